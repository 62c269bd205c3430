"""Read channel layouts: the loudspeaker of each channel of a file, and its downmix weight.

Channels have FFmpeg's names: FL and FR are the front pair, FC is the front centre, LFE the low
frequency effects, BL, BR, BC, SL, SR the surrounds. An empty layout is unknown, as in recordings of
several microphones.

Cut the blocks of a decoder into windows of a fixed length.

Mix the channels of a file to one.

Channels are averaged, or weighted by their layout. If that cancels most of the audio, as in stereo
with opposite phases, the louder channel is used instead. A file with a front centre becomes three
columns, the mix, the centre and the rest, from which `chosen` selects one.

Decisions are made for windows of a fixed length, so that they do not depend on a library's block
size.

Silence crosstalk between channels that hold one speaker each.

A file may have the same audio in two channels, or each speaker at low volume in the other's
channel. Both would be transcribed twice. A channel is therefore silenced wherever it repeats
another one. To find this, windows of both channels are correlated at short delays and with either
sign. A window in which the channel's own speaker talks, too, does not correlate and is kept.

Select the front centre channel of surround sound while only that channel has speech.

Films have dialogue in the centre, and music and effects in the other channels, so a downmix is
mostly music. VAD runs on the centre and on the rest. The decision is made for each block, so speech
may start late, and speech in the other channels is not lost.
"""

import contextlib
import re
import struct
from collections.abc import Callable, Generator, Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.containers import Bytes
from serve.speech.rate import SAMPLE_RATE
from serve.speech.vad import FRAME, Probabilities, VadModel

Layout = tuple[str, ...]
UNKNOWN: Layout = ()
CENTRE = "FC"

_GUESSED_CENTRE = 2
"""The centre's index in the default layouts of 3, 5, 6, 7 and 8 channels."""
_GUESSED_COUNTS = (3, 5, 6, 7, 8)

# The order of the bits in WAVE_FORMAT_EXTENSIBLE's channel mask.
_MASK_NAMES = tuple("FL FR FC LFE BL BR FLC FRC BC SL SR TC TFL TFC TFR TBL TBC TBR".split())
_FLAC_LAYOUTS: dict[int, Layout] = {
    3: ("FL", "FR", "FC"),
    4: ("FL", "FR", "BL", "BR"),
    5: ("FL", "FR", "FC", "BL", "BR"),
    6: ("FL", "FR", "FC", "LFE", "BL", "BR"),
    7: ("FL", "FR", "FC", "LFE", "BC", "SL", "SR"),
    8: ("FL", "FR", "FC", "LFE", "BL", "BR", "SL", "SR"),
}
_FLAC_MASK = re.compile(rb"WAVEFORMATEXTENSIBLE_CHANNEL_MASK=0x([0-9a-f]{1,8})", re.IGNORECASE)
_HEAD_BYTES = 1 << 14
_EXTENSIBLE = 0xFFFE

# ITU-R BS.775: centre and surrounds are attenuated by 3 dB, and the LFE channel is dropped.
_HALF_POWER = 0.5**0.5
_WEIGHTS = {
    **dict.fromkeys(("FL", "FR", "DL", "DR"), 1.0),
    **dict.fromkeys(("FC", "FLC", "FRC", "BL", "BR", "BC", "SL", "SR", "WL", "WR"), _HALF_POWER),
    **dict.fromkeys(("SDL", "SDR", "TC", "TFL", "TFC", "TFR", "TBL", "TBC", "TBR"), 0.5),
    **dict.fromkeys(("TSL", "TSR"), 0.5),
    **dict.fromkeys(("LFE", "LFE2"), 0.0),
}


def wav_layout(audio: Bytes, channels: int) -> Layout:
    """Return the layout of a WAV file, from its extensible format's channel mask."""
    head = audio[:_HEAD_BYTES]
    at = head.find(b"fmt ", 12)
    if at < 0 or len(head) < at + 32:
        return UNKNOWN
    (tag,) = struct.unpack("<H", head[at + 8 : at + 10])
    (mask,) = struct.unpack("<I", head[at + 28 : at + 32])
    return _of_mask(mask, channels) if tag == _EXTENSIBLE else UNKNOWN


def flac_layout(audio: Bytes, channels: int) -> Layout:
    """Return the layout of a FLAC file, from its comment or else the format's default."""
    if mask := _FLAC_MASK.search(audio[:_HEAD_BYTES]):
        return _of_mask(int(mask[1], 16), channels)
    return _FLAC_LAYOUTS.get(channels, UNKNOWN)


def known(names: Layout) -> Layout:
    """Return a layout if all its channels have a weight, else the unknown layout."""
    return names if all(name in _WEIGHTS for name in names) else UNKNOWN


def weights(layout: Layout, channels: int) -> Samples | None:
    """Return the downmix weights, float32 (channels,), with a sum of 1.

    None means equal weights: the layout is unknown, mono or stereo.
    """
    if channels < 3 or len(layout) != channels:
        return None
    values = np.array([_WEIGHTS[name] for name in layout], np.float32)
    total = values.sum()
    return values / total if total > 0 else None


def centre(layout: Layout, channels: int) -> int | None:
    """Return the index of the centre channel; None if there is none.

    For an unknown layout this is the index in the default layout.
    """
    if channels < 3:
        return None
    if len(layout) == channels:
        return layout.index(CENTRE) if CENTRE in layout else None
    return _GUESSED_CENTRE if channels in _GUESSED_COUNTS else None


def _of_mask(mask: int, channels: int) -> Layout:
    names = tuple(name for bit, name in enumerate(_MASK_NAMES) if mask >> bit & 1)
    return names if len(names) == channels else UNKNOWN


Framed = tuple[int, Layout, Samples]
"""The rate in Hz, the channel layout, and samples, float32 (n, channels)."""


class Framer:
    """A buffer that cuts blocks into windows of one rate and one layout.

    Args:
        per_s: windows per second; the last window before a change or the end may be shorter.
    """

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._held: list[Samples] = []
        self._count = 0
        self._kind: tuple[int, Layout, int] = (0, (), 0)  # rate, layout, channels

    def push(self, rate: int, layout: Layout, block: Samples) -> Iterator[Framed]:
        """Add a block, float32 (n, channels); yield the complete windows."""
        kind = (rate, layout, block.shape[1])
        if kind != self._kind:
            yield from self.finish()
            self._kind = kind
        self._held.append(block)
        self._count += len(block)
        length = max(1, rate // self._per_s)
        if self._count < length:
            return
        whole = np.concatenate(self._held) if len(self._held) > 1 else self._held[0]
        end = len(whole) - len(whole) % length
        self._held, self._count = [whole[end:]], len(whole) - end
        for start in range(0, end, length):
            yield rate, layout, whole[start : start + length]

    def finish(self) -> Iterator[Framed]:
        """Yield the last, incomplete window."""
        if self._count:
            yield self._kind[0], self._kind[1], np.concatenate(self._held)
        self._held, self._count = [], 0


def faded(old: Samples, new: Samples, rate: int) -> Samples:
    """Crossfade from old to new samples, both float32 (n,), over the first 10 ms."""
    n = min(len(new), max(1, rate // 100))
    ramp = np.linspace(0, 1, n, dtype=np.float32)
    return np.concatenate([old[:n] * (1 - ramp) + new[:n] * ramp, new[n:]])


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
        self._columns = centre(layout, channels) is not None
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
        shares = weights(layout, channels)
        mean: Samples = window.mean(axis=1, dtype=np.float32) if shares is None else window @ shares
        mono = self._uncancelled(rate, window, mean, shares)
        if not self._columns:
            return mono
        place = centre(layout, channels)
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


_REPEAT_WINDOWS_PER_S = 4
_RATE = 4_000  # approximate rate in Hz at which channels are compared
_MAX_DELAY_S = 0.02
# Minimum squared correlation of a repetition, after a window with speech and after a repetition.
_SAME = (0.9, 0.6)
_LEAKED = (0.4, 0.25)  # the same for audio that is much quieter than the other channel's
_QUIETER = 0.1  # energy ratio below which audio is much quieter
_COPY_LOUDER = 4.0  # energy ratio above which the louder of two copies is kept, not the first one
_REPEAT_SILENCE = 1e-9  # mean square: 90 dB below full scale
_REPEAT_PAUSE = 1e-3  # energy relative to the loudest window; a window below it has no speech
_LOUDEST_DECAY = 0.998  # decay per window of the loudest window's energy

_Signals = npt.NDArray[np.float64]


class OwnChannel:
    """A filter that selects one channel and silences its repetitions of other channels.

    Args:
        channel: the channel's index, from 0 on.
    """

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._framer = Framer(_REPEAT_WINDOWS_PER_S)
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
        self._loudest = max(_LOUDEST_DECAY * self._loudest, own)
        if not own > _REPEAT_SILENCE * len(signals):
            return self._repeats
        source = next(
            (
                other
                for other in range(window.shape[1])
                if other != self._channel and self._is_copy(signals, energies, other, rate)
            ),
            None,
        )
        if own <= _REPEAT_PAUSE * self._loudest:  # no speech
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
            if own_energy > _COPY_LOUDER * other_energy:
                self._leads[other] = True
            elif other_energy > _COPY_LOUDER * own_energy:
                self._leads[other] = False
        if own_energy < _QUIETER * other_energy:
            return explained > _LEAKED[self._repeats]
        leads = self._leads.get(other, self._channel < other)
        much_louder = own_energy > _COPY_LOUDER * other_energy
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


_BLOCK = 250 * FRAME  # samples per decision: 8 s
_MIX, _CENTRE, _REST = range(3)  # columns from `serve.speech.channels`
_VOICE = 0.5  # minimum probability of speech in the centre
_OTHER_VOICE = 0.6  # the same in the rest, higher because music may look like speech
_NEAR = 10  # frames around speech in the centre in which the rest may have its echo
_MIN_CENTRE = 8  # minimum frames of speech in the centre for a decision
_MIN_OTHER = 25  # minimum frames of other speech that keep the mix: 0.8 s
_CLEARER = 0.15  # minimum lead of the centre's mean probability


def chosen(
    blocks: Generator[Samples, None, None], warn: Callable[[str], None]
) -> Generator[Samples, None, None]:
    """Convert blocks to mono: the centre or the mix of three columns; mono blocks do not change.

    Args:
        blocks: float32 (n,) or (n, 3) each, 16 kHz; closed together with this generator.
        warn: called at the end if channels were dropped.

    Yields:
        float32 (n,).

    Raises:
        EarshotError: VAD cannot be loaded.
    """
    with contextlib.closing(blocks):
        choice: _Choice | None = None
        for block in blocks:
            if block.ndim == 1:
                yield block
                continue
            choice = choice or _Choice()
            yield from choice.push(block)
        if choice is not None:
            yield from choice.finish()
            if text := choice.warning():
                warn(text)


class _Choice:
    """A selector between the centre and the mix for one file."""

    def __init__(self) -> None:
        self._detectors = {column: VadModel() for column in (_CENTRE, _REST)}
        self._held = np.zeros((0, 3), np.float32)
        self._column = _MIX
        self._taken = {_MIX: 0, _CENTRE: 0}  # samples

    def push(self, block: Samples) -> list[Samples]:
        self._held = np.concatenate([self._held, block])
        given = []
        while len(self._held) >= _BLOCK:
            given.append(self._choose(self._held[:_BLOCK]))
            self._held = self._held[_BLOCK:]
        return given

    def finish(self) -> list[Samples]:
        return [self._choose(self._held)] if len(self._held) else []

    def warning(self) -> str:
        alone, all_of_it = self._taken[_CENTRE], sum(self._taken.values())
        if not alone:
            return ""
        return (
            "only the front centre channel has speech in "
            f"{alone / SAMPLE_RATE:.1f} of {all_of_it / SAMPLE_RATE:.1f} s; the other channels are "
            "dropped there"
        )

    def _choose(self, block: Samples) -> Samples:
        centre, rest = (self._listen(column, block) for column in (_CENTRE, _REST))
        self._column = _decided(centre, rest, self._column)
        self._taken[self._column] += len(block)
        return block[:, self._column].copy()

    def _listen(self, column: int, block: Samples) -> Probabilities:
        samples = np.pad(block[:, column], (0, -len(block) % FRAME))
        return self._detectors[column].probabilities(samples)


def _decided(centre: Probabilities, rest: Probabilities, before: int) -> int:
    """Choose a block's column from the speech probabilities of the centre and the rest."""
    voice, other = centre >= _VOICE, rest >= _OTHER_VOICE
    near = np.convolve(voice, np.ones(2 * _NEAR + 1))[_NEAR : _NEAR + len(voice)] > 0
    if np.count_nonzero(other & ~near) >= _MIN_OTHER:
        return _MIX
    n_voice = np.count_nonzero(voice)
    if n_voice < _MIN_CENTRE:
        return before
    only_there = 2 * np.count_nonzero(other & voice) <= n_voice
    clearer = centre[voice].mean() > rest[voice].mean() + _CLEARER
    return _CENTRE if only_there or clearer else _MIX
