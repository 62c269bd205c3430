"""Silence crosstalk between channels that hold one speaker each.

A file may have the same audio in two channels, or each speaker at low volume in the other's
channel. Both would be transcribed twice. A channel is therefore silenced wherever it repeats
another one. To find this, windows of both channels are correlated at short delays and with either
sign. A window in which the channel's own speaker talks, too, does not correlate and is kept.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.framing import Framer, faded
from serve.speech.layouts import Layout

_WINDOWS_PER_S = 4
_RATE = 4_000  # approximate rate in Hz at which channels are compared
_MAX_DELAY_S = 0.02
# Minimum squared correlation of a repetition, after a window with speech and after a repetition.
_SAME = (0.9, 0.6)
_LEAKED = (0.4, 0.25)  # the same for audio that is much quieter than the other channel's
_QUIETER = 0.1  # energy ratio below which audio is much quieter
_LOUDER = 4.0  # energy ratio above which the louder of two copies is kept, not the first one
_SILENCE = 1e-9  # mean square: 90 dB below full scale
_PAUSE = 1e-3  # energy relative to the loudest window; a window below it has no speech
_FORGET = 0.998  # decay per window of the loudest window's energy

_Signals = npt.NDArray[np.float64]


class OwnChannel:
    """A filter that selects one channel and silences its repetitions of other channels.

    Args:
        channel: the channel's index, from 0 on.
    """

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._framer = Framer(_WINDOWS_PER_S)
        self._leads: dict[int, bool] = {}  # whether this one of two copies is kept, by channel
        self._loudest = 0.0
        self._repeats = False
        # The windows that are not yielded yet: rate, samples, whether they are repetitions.
        self._held: list[tuple[int, Samples, bool]] = []
        self._repeats_before = self._silent = False
        self._s = self._repeated_s = 0.0
        self._of: set[int] = set()

    def push(self, rate: int, layout: Layout, block: Samples) -> Iterator[tuple[int, Samples]]:
        """Add a block; see `Downmix.push`."""
        for at, _, window in self._framer.push(rate, layout, block):
            yield from self._next(at, window)

    def finish(self) -> Iterator[tuple[int, Samples]]:
        """Yield the remaining samples."""
        for rate, _, window in self._framer.finish():
            yield from self._next(rate, window)
        for rate, samples, repeats in self._held:
            yield rate, self._silenced(rate, samples, repeats and self._repeats_before)
        self._held = []

    def warnings(self) -> list[str]:
        """Return a warning about the repetitions."""
        if not self._of:
            return []
        others = " and ".join(str(other + 1) for other in sorted(self._of))
        return [
            f"channel {self._channel + 1} repeats channel {others} in {self._repeated_s:.1f} of "
            f"{self._s:.1f} s, as a copy or as crosstalk; the repetition is not transcribed"
        ]

    def _next(self, rate: int, window: Samples) -> Iterator[tuple[int, Samples]]:
        """Add a window, and yield the one before it, which is kept if a neighbour has speech."""
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
        with np.errstate(all="ignore"):  # invalid values are rejected later
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
        if own <= _PAUSE * self._loudest:  # no speech
            return self._repeats or source is not None
        if source is not None:
            self._of.add(source)
            self._repeated_s += len(window) / rate
        return source is not None

    def _is_copy(self, signals: _Signals, energies: _Signals, other: int, rate: int) -> bool:
        """Return whether a window repeats another channel's; both channels agree on the result."""
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
    """Downsample the channels and remove their mean; returns float64 (m, channels)."""
    step = max(1, rate // _RATE)
    whole = max(1, len(window) // step)
    if len(window) < step:
        step = len(window)
    slow: _Signals = window[: whole * step].reshape(whole, step, -1).mean(axis=1, dtype=np.float64)
    slow -= slow.mean(axis=0)
    return slow


def _explained(a: _Signals, b: _Signals, delay: int) -> float:
    """Return the maximum squared correlation of two signals at delays of up to `delay` samples."""
    size = 1 << (2 * len(a) - 1).bit_length()
    products = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    near = np.concatenate([products[: delay + 1], products[-delay:]]) if delay else products[:1]
    return float((near**2).max())
