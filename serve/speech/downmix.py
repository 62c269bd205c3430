"""Mix the channels of a file to one.

Channels are averaged, or weighted by their layout (`serve.speech.layouts`). If that cancels most of
the audio, as in stereo with opposite phases, the louder channel is used instead. A file with a
front centre becomes three columns, the mix, the centre and the rest, from which
`serve.speech.centre` chooses.

Decisions are made for windows of a fixed length, so that they do not depend on a library's block
size.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech import layouts
from serve.speech.framing import Framer, faded
from serve.speech.layouts import Layout

COLUMNS = 3
"""The mix, the centre alone, and the mix without the centre."""

_WINDOWS_PER_S = 2
_FORGET = 0.5  # decay per window of the energies
_PAUSE = 0.01  # energy relative to the previous windows; a window below it has no speech
# The mix's energy, relative to the sum of the channels' energies.
_CANCELS_BELOW = 0.15
_CANCELS_NO_MORE = 0.4
_LOUDER = 2.0  # energy ratio above which another channel replaces the selected one
_SILENCE = 1e-8  # mean square: 80 dB below full scale


class Downmix:
    """A mixer of a file's blocks.

    Args:
        layout: the layout with which the file begins.
        channels: the number of channels with which it begins.
    """

    def __init__(self, layout: Layout, channels: int) -> None:
        self._columns = layouts.centre(layout, channels) is not None
        self._framer = Framer(_WINDOWS_PER_S)
        self._energies: npt.NDArray[np.float64] = np.zeros(0)  # weighted, by channel
        self._loudness = 0.0
        self._taken: int | None = None  # the channel used instead of the mix
        self._total_s = self._cancelled_s = 0.0

    def push(self, rate: int, layout: Layout, block: Samples) -> Iterator[tuple[int, Samples]]:
        """Add a block, and yield the mixed samples that are decided.

        Args:
            rate: Hz.
            layout: the names of the channels.
            block: float32 (n, channels).

        Yields:
            The rate, and float32 (n,), or (n, COLUMNS) if the file began with a front centre.
        """
        if block.shape[1] > 1 or self._columns:
            for at, names, window in self._framer.push(rate, layout, block):
                yield at, self._mix(at, names, window)
        else:
            yield from self.finish()  # the channels have changed
            self._total_s += len(block) / rate
            yield rate, block[:, 0]

    def finish(self) -> Iterator[tuple[int, Samples]]:
        """Yield the remaining samples."""
        for rate, layout, window in self._framer.finish():
            yield rate, self._mix(rate, layout, window)

    def warnings(self) -> list[str]:
        """Return a warning if channels were dropped."""
        if not self._cancelled_s:
            return []
        return [
            f"the channels cancel each other (opposite phase) in {self._cancelled_s:.1f} of "
            f"{self._total_s:.1f} s; only the louder channel is transcribed there"
        ]

    def _mix(self, rate: int, layout: Layout, window: Samples) -> Samples:
        channels = window.shape[1]
        shares = layouts.weights(layout, channels)
        mean: Samples = window.mean(axis=1, dtype=np.float32) if shares is None else window @ shares
        mono = self._uncancelled(rate, window, mean, shares)
        if not self._columns:
            return mono
        place = layouts.centre(layout, channels)
        if place is None:  # the layout has changed
            return np.stack([mono, np.zeros_like(mono), mono], axis=1)
        share = 1 / channels if shares is None else float(shares[place])
        rest = (mean - share * window[:, place]) / (1 - share) if share < 1 else 0 * mean
        return np.stack([mono, window[:, place], rest], axis=1)

    def _uncancelled(
        self, rate: int, window: Samples, mean: Samples, shares: Samples | None
    ) -> Samples:
        """Return the mix, or one channel if the channels cancel each other."""
        channels = window.shape[1]
        self._total_s += len(window) / rate
        if channels == 1:
            return mean
        weights = np.full(channels, 1 / channels) if shares is None else shares
        if len(self._energies) != channels:
            self._energies, self._loudness, self._taken = np.zeros(channels), 0.0, None
        before = self._taken
        with np.errstate(all="ignore"):  # invalid values are rejected later
            energies = np.einsum("ij,ij->j", window, window, dtype=np.float64)
            if energies.max() > _SILENCE * len(window):
                self._decide(float(np.dot(mean, mean)), energies * weights**2)
        if self._taken is not None:
            self._cancelled_s += len(window) / rate
        new = mean if self._taken is None else window[:, self._taken]
        if before == self._taken:
            return new
        return faded(mean if before is None else window[:, before], new, rate)

    def _decide(self, mix: float, energies: npt.NDArray[np.float64]) -> None:
        """Select the mix or one channel from a window's energies."""
        apart = float(energies.sum())
        self._loudness = max(apart, _FORGET * self._loudness)
        if not apart > _PAUSE * self._loudness:
            return  # no speech, or all of it in channels with weight 0
        self._energies = _FORGET * self._energies + energies
        if mix < _CANCELS_BELOW * apart:
            loudest, taken = int(self._energies.argmax()), self._taken
            if taken is None or self._energies[loudest] > _LOUDER * self._energies[taken]:
                self._taken = loudest
        elif not mix < _CANCELS_NO_MORE * apart:
            self._taken = None
