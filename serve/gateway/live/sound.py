"""Audio as it comes over the wire, piece by piece, to samples of 16 kHz."""

import functools
import io

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from serve.contract.messages import Samples
from serve.gateway.live.settings import Format
from serve.speech.rate import SAMPLE_RATE

_PCM_RATE, _G711_RATE = 24_000, 8_000  # Hz, which OpenAI's API has, unless PCM says another
_LAWS = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}  # as libsndfile calls them


class Inlet:
    """Takes one stream's audio in one format.

    Args:
        format: of its bytes: 16-bit little-endian PCM, or G.711.
    """

    def __init__(self, format: Format) -> None:
        self._law = _LAWS.get(format.type)
        self._odd = b""  # the first byte of a sample whose second one has not come
        self._rate = (format.rate or _PCM_RATE) if self._law is None else _G711_RATE
        self._restart()

    @property
    def bytes_per_s(self) -> int:
        """Bytes of a second."""
        return self._rate * (2 if self._law is None else 1)

    def samples(self, data: bytes) -> Samples:
        """Return the samples that are known after some more bytes.

        Resampling holds back some milliseconds. The first byte of a sample waits for the second.
        """
        if self._law is None:
            data = self._odd + data
            whole = len(data) // 2 * 2
            self._odd = data[whole:]
            block = np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768
        else:
            block = _table(self._law)[np.frombuffer(data, np.uint8)]
        return self._resampled(block, last=False)

    def clear(self) -> None:
        """Forget half a sample: the next byte is the first one of a sample."""
        self._odd = b""

    def rest(self) -> Samples:
        """Return what was held back; what comes next begins anew, but for half a sample."""
        samples = self._resampled(np.zeros(0, np.float32), last=True)
        self._restart()
        return samples

    def _restart(self) -> None:
        self._resampler = soxr.ResampleStream(
            self._rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ"
        )

    def _resampled(self, block: Samples, last: bool) -> Samples:
        samples: Samples = self._resampler.resample_chunk(block, last=last)
        return samples


@functools.cache
def _table(law: str) -> npt.NDArray[np.float32]:
    """Return the sample that each byte of G.711 stands for, by libsndfile, (256,)."""
    samples, _ = soundfile.read(
        io.BytesIO(bytes(range(256))),
        samplerate=_G711_RATE,
        channels=1,
        format="RAW",
        subtype=law,
        dtype="float32",
    )
    table: npt.NDArray[np.float32] = samples
    return table
