"""A stream's audio: from bytes as they come to frames with and without speech.

All positions are samples of 16 kHz from the stream's beginning.
"""

import asyncio
import bisect
import collections
import dataclasses
import functools
import io
import math
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from serve.contract.messages import Samples, SpeechOptions
from serve.gateway.live.settings import Format
from serve.speech.rate import SAMPLE_RATE
from serve.speech.vad import FRAME, VadModel, VadState

_BLOCK_S = 0.096  # audio of a block at least: handing one to a thread costs as much as a frame
_PCM_RATE, _G711_RATE = 24_000, 8_000  # Hz, as OpenAI's API has them
_LAWS = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}  # as libsndfile calls them
_ARRIVALS = 4096  # the latest pieces of audio whose times of arrival are kept


@dataclasses.dataclass(frozen=True, eq=False)
class VadFrame:
    """The next samples of a stream."""

    samples: Samples  # float32 (n,)
    speech: bool  # they have speech
    ends: bool = False  # the silence that ends an utterance is complete


class Hearing:
    """Detects speech in the audio of one stream. For one task of an event loop.

    Resampling and the network run in threads, in blocks of 96 ms and more. Smaller pieces of audio
    are collected until they are such a block.

    Args:
        format: the format of the stream's bytes.
        options: the bounds of speech; `pad` is not used.
        detector: the stream's own.
        pool: runs one block of the stream at a time.
    """

    def __init__(
        self, format: Format, options: SpeechOptions, detector: VadModel, pool: Executor
    ) -> None:
        self._detector = detector
        self._pool = pool
        self._voice = VadState(options)
        # Samples until a piece of audio, with that piece, and the time at which it came.
        self._arrivals = collections.deque([(0.0, clock_s())], maxlen=_ARRIVALS)
        self._data = bytearray()  # smaller than a block; a sample's first byte waits for the second
        self._partial = np.zeros(0, np.float32)  # samples of a frame that is not complete
        self._position = 0  # samples in the frames before
        self._set_format(format)

    def _set_format(self, format: Format) -> None:
        self._format = format
        self._law = _LAWS.get(format.type)  # None: 16-bit little-endian PCM
        rate = (format.rate or _PCM_RATE) if self._law is None else _G711_RATE
        self._sample_bytes = 2 if self._law is None else 1
        self.bytes_per_s = rate * self._sample_bytes
        """Bytes of a second of the stream."""
        self._resampler = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
        self._data.clear()

    def arrived_s(self, sample: int) -> float:
        """Return the loop's time at which a sample had come."""
        index = bisect.bisect_left(self._arrivals, (sample, -math.inf))
        return self._arrivals[min(index, len(self._arrivals) - 1)][1]

    async def hear(self, data: bytes) -> list[VadFrame]:
        """Take more bytes; return the frames that are complete, or none before a block is."""
        samples = len(data) * SAMPLE_RATE / self.bytes_per_s
        self._arrivals.append((self._arrivals[-1][0] + samples, clock_s()))
        self._data += data
        return await self.flush() if len(self._data) >= _BLOCK_S * self.bytes_per_s else []

    async def flush(self, end: bool = False) -> list[VadFrame]:
        """Return the frames of the bytes that have come, however few these are.

        Args:
            end: also return the samples that the resampler holds back, and start it anew.
        """
        size = len(self._data) - len(self._data) % self._sample_bytes
        if not (size or end):
            return []
        data, self._data = bytes(self._data[:size]), self._data[size:]
        job = self._pool.submit(self._frames, data, end)
        if job.done():  # always of a pool that runs jobs where they are submitted
            return job.result()
        frames = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(frames)
        except asyncio.CancelledError:
            await asyncio.wait((frames,))  # no thread works on this stream afterwards
            raise

    def take_partial_frame(self) -> Samples:
        """Remove and return the samples of a frame that is not complete."""
        samples, self._partial = self._partial, np.zeros(0, np.float32)
        self._position += len(samples)
        return samples

    def clear(self) -> int:
        """Remove all that is no complete frame, after a `flush`; return the number of samples."""
        self._data.clear()
        return len(self.take_partial_frame())

    def tune(self, format: Format, options: SpeechOptions, speaking: bool) -> None:
        """Judge what comes after a `flush` by other settings.

        Args:
            format: the format of the stream's bytes.
            options: the bounds of speech.
            speaking: whether an utterance is open, which has to end.
        """
        if format != self._format:
            self._set_format(format)
        previous, self._voice = self._voice, VadState(options)
        self._voice.speaking, self._voice.quiet_since = previous.speaking, previous.quiet_since
        if speaking and not previous.speaking:
            self._voice.speaking, self._voice.quiet_since = True, self._position

    def _frames(self, data: bytes, end: bool) -> list[VadFrame]:
        if self._law is None:
            block = np.frombuffer(data, "<i2").astype(np.float32) / 32768
        else:
            block = _table(self._law)[np.frombuffer(data, np.uint8)]
        samples = np.concatenate([self._partial, self._resampler.resample_chunk(block, last=end)])
        if end:
            self._resampler.clear()
        frames, partial = np.split(samples, [len(samples) // FRAME * FRAME])
        self._partial = partial.copy()
        if not len(frames):
            return []
        probabilities = self._detector.probabilities(frames)
        return list(map(self._frame, frames.reshape(-1, FRAME), probabilities))

    def _frame(self, samples: Samples, probability: np.float32) -> VadFrame:
        was_speaking = self._voice.speaking
        self._voice.step(float(probability), self._position)
        self._position += FRAME
        speaking = self._voice.speaking
        speech = speaking and self._voice.quiet_since is None
        return VadFrame(samples, speech, ends=was_speaking and not speaking)


@functools.cache
def _table(law: str) -> npt.NDArray[np.float32]:
    """Return the sample that each byte of G.711 stands for, by libsndfile, (256,)."""
    codes = io.BytesIO(bytes(range(256)))
    raw: Any = {"samplerate": _G711_RATE, "channels": 1, "format": "RAW", "subtype": law}
    table: npt.NDArray[np.float32] = soundfile.read(codes, dtype="float32", **raw)[0]
    return table


def clock_s() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()
