"""Measure the bandwidth of a recording, to detect audio that lacks the frequencies of speech.

Audio with a sample rate of 1 kHz has nothing above 500 Hz, even if it is resampled to a higher
rate. Whisper hallucinates sentences for it at every temperature.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from serve.contract.messages import Samples
from serve.speech.rate import SAMPLE_RATE

_FRAME = 1024  # samples
_HZ = SAMPLE_RATE / _FRAME  # width of a bin
_SPEECH_HZ = 1_050  # speech always has energy above this frequency
_HUM_HZ = 60  # lower frequencies (mains hum, offsets) are ignored
_SHARE = 1e-6  # minimum share of the total energy: -60 dB
_SILENCE = 1e-10  # mean square: 100 dB below full scale
_MANY = 64  # frames per batch
_HANN = np.hanning(_FRAME).astype(np.float32)


class Bandwidth:
    """A monitor of a recording's blocks that stops once it has found high frequencies."""

    def __init__(self) -> None:
        self._wide = False
        self._energies = np.zeros(_FRAME // 2 + 1)
        self._rest = np.zeros(0, np.float32)

    def watch(self, blocks: Iterable[Samples]) -> Iterator[Samples]:
        """Analyze blocks, float32 (n,) at 16 kHz, and yield them unchanged."""
        for block in blocks:
            if not self._wide:
                self._take(block)
            yield block

    @property
    def narrow(self) -> bool:
        """Whether all audio so far is too low for speech."""
        return not self._wide and bool(self._energies.any())

    def warning(self) -> str:
        """Return a warning if the audio is too low for speech, else ""."""
        if not self.narrow:
            return ""
        above = np.cumsum(self._energies[::-1])[::-1] > _SHARE * self._energies.sum()
        highest_hz = (np.flatnonzero(above)[-1] - 1) * _HZ  # a tone spans two bins
        return (
            "the audio has no frequencies above "
            f"{100 * max(1, np.ceil(highest_hz / 100)):.0f} Hz, but speech needs 300 to 3400 Hz: "
            "the text may be hallucinated; send the recording at a sample rate of at least 8000 Hz"
        )

    def _take(self, block: Samples) -> None:
        samples = np.concatenate([self._rest, block])
        whole = len(samples) // _FRAME
        self._rest = samples[whole * _FRAME :].copy()
        frames = samples[: whole * _FRAME].reshape(whole, _FRAME)
        for at in range(0, whole, _MANY):
            part = frames[at : at + _MANY]
            loud = part[np.einsum("ij,ij->i", part, part) > _SILENCE * _FRAME]
            if not len(loud):
                continue
            spectra = np.abs(np.fft.rfft(loud * _HANN)) ** 2
            self._energies += spectra.sum(axis=0)
            self._energies[: round(_HUM_HZ / _HZ)] = 0.0
            high = self._energies[round(_SPEECH_HZ / _HZ) :].sum()
            if high > _SHARE * self._energies.sum():
                self._wide, self._rest = True, self._rest[:0]
                return
