"""Crosstalk: what one channel holds of another, where each is a speaker's own.

A file may hold the same sound twice, or each speaker quietly in the other's channel. Both would be
transcribed a second time. A channel is silenced where it repeats what another channel holds:
windows of both are correlated, at any short delay and with either sign. A speaker who talks at the
same time makes the window unlike the other channel's, and keeps it.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.framing import Framer, faded
from serve.speech.layouts import Layout

_WINDOWS_PER_S = 4
_RATE = 4_000  # Hz, about, at which channels are compared
_MAX_DELAY_S = 0.02
# The share of a window that the other channel must explain, after speech and after a repetition.
_SAME = (0.9, 0.6)
_LEAKED = (0.4, 0.25)  # the same for sound that is much quieter than the other channel's
_QUIETER = 0.1  # energy ratio below which sound is much quieter
_LOUDER = 4.0  # energy ratio above which of two copies the louder one is kept, not the first
_SILENCE = 1e-9  # mean square: 90 dB below full scale
_PAUSE = 1e-3  # energy below that of the loudest window, in which nobody speaks
_FORGET = 0.998  # of the loudest window, from one to the next

_Signals = npt.NDArray[np.float64]


class OwnChannel:
    """One channel of a file without what it repeats of others.

    Args:
        channel: its place, from 0 on.
    """

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._framer = Framer(_WINDOWS_PER_S)
        self._leads: dict[int, bool] = {}  # whether it, and not another one, is kept of two copies
        self._loudest = 0.0
        self._repeats = False
        # The windows that are not given out: rate, samples, whether they only repeat.
        self._held: list[tuple[int, Samples, bool]] = []
        self._repeats_before = self._silent = False
        self._s = self._repeated_s = 0.0
        self._of: set[int] = set()

    def push(self, rate: int, layout: Layout, block: Samples) -> Iterator[tuple[int, Samples]]:
        """Take one block; see `Downmix.push`."""
        for at, _, window in self._framer.push(rate, layout, block):
            yield from self._next(at, window)

    def finish(self) -> Iterator[tuple[int, Samples]]:
        """Yield what is left."""
        for rate, _, window in self._framer.finish():
            yield from self._next(rate, window)
        for rate, samples, repeats in self._held:
            yield rate, self._silenced(rate, samples, repeats and self._repeats_before)
        self._held = []

    def warnings(self) -> list[str]:
        """Tell how much it repeats."""
        if not self._of:
            return []
        others = " and ".join(str(other + 1) for other in sorted(self._of))
        return [
            f"channel {self._channel + 1} repeats channel {others} in {self._repeated_s:.1f} of "
            f"{self._s:.1f} s, as a copy or as crosstalk; that is transcribed once"
        ]

    def _next(self, rate: int, window: Samples) -> Iterator[tuple[int, Samples]]:
        """Take one window, and yield the one before it: speech needs room on either side."""
        self._s += len(window) / rate
        self._repeats = self._is_repeated(rate, window)
        own = window[:, self._channel]
        for at, samples, repeats in self._held:
            silent = repeats and self._repeats_before and self._repeats
            self._repeats_before = repeats
            yield at, self._silenced(at, samples, silent)
        if not self._held:
            self._repeats_before = self._repeats
        self._held = [(rate, own, self._repeats)]

    def _silenced(self, rate: int, samples: Samples, silent: bool) -> Samples:
        before, self._silent = self._silent, silent
        if silent == before:
            return np.zeros_like(samples) if silent else samples
        nothing = np.zeros_like(samples)
        return faded(samples, nothing, rate) if silent else faded(nothing, samples, rate)

    def _is_repeated(self, rate: int, window: Samples) -> bool:
        with np.errstate(all="ignore"):  # values that make no sense are refused later
            signals = _slowed(window, rate)
            energies = np.einsum("ij,ij->j", signals, signals)
        own = float(energies[self._channel])
        self._loudest = max(_FORGET * self._loudest, own)
        if not own > _SILENCE * len(signals):
            return self._repeats
        source = next(
            (
                other
                for other in range(window.shape[1])
                if other != self._channel and self._is_copy(signals, energies, other, rate)
            ),
            None,
        )
        if own <= _PAUSE * self._loudest:  # speech would be louder
            return self._repeats or source is not None
        if source is not None:
            self._of.add(source)
            self._repeated_s += len(window) / rate
        return source is not None

    def _is_copy(self, signals: _Signals, energies: _Signals, other: int, rate: int) -> bool:
        """Tell whether a window repeats another channel's; each pair is judged by both alike."""
        own_energy, other_energy = float(energies[self._channel]), float(energies[other])
        if not other_energy > 0:
            return False
        step = max(1, rate // _RATE)
        first, second = sorted((self._channel, other))
        explained = _explained(
            signals[:, first], signals[:, second], round(_MAX_DELAY_S * rate / step)
        ) / (own_energy * other_energy)
        if explained > _SAME[False]:
            if own_energy > _LOUDER * other_energy:
                self._leads[other] = True
            elif other_energy > _LOUDER * own_energy:
                self._leads[other] = False
        if own_energy < _QUIETER * other_energy:
            return explained > _LEAKED[self._repeats]
        leads = self._leads.get(other, self._channel < other)
        much_louder = own_energy > _LOUDER * other_energy
        return explained > _SAME[self._repeats] and not (leads or much_louder)


def _slowed(window: Samples, rate: int) -> _Signals:
    """Return channels at a low rate and without their mean, float64 (m, channels)."""
    step = max(1, rate // _RATE)
    whole = max(1, len(window) // step)
    if len(window) < step:
        step = len(window)
    slow: _Signals = window[: whole * step].reshape(whole, step, -1).mean(axis=1, dtype=np.float64)
    slow -= slow.mean(axis=0)
    return slow


def _explained(a: _Signals, b: _Signals, delay: int) -> float:
    """Return the highest squared correlation of two signals, at a delay of at most so much."""
    size = 1 << (2 * len(a) - 1).bit_length()
    products = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    near = np.concatenate([products[: delay + 1], products[-delay:]]) if delay else products[:1]
    return float((near**2).max())
