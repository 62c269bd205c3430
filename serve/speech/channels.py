"""Mix the channels of a file to one, or select one of them.

Layouts name the loudspeaker of each channel as FFmpeg does: FL and FR are the front pair, FC is the
front centre, LFE the low frequency effects, BL, BR, BC, SL, SR the surrounds. An empty layout is
unknown, as in recordings of several microphones.

`mix` averages channels, or weights them by their layout. If that cancels most of the audio, as in
stereo with opposite phases, the louder channel is used instead. A file with a front centre becomes
three columns, the mix, the centre and the rest, from which `select_column` selects one: films have
dialogue in the centre, and music and effects in the other channels, so a downmix is mostly music.
VAD runs on the centre and on the rest. The decision is made for each block, so speech may start
late, and speech in the other channels is not lost.

With one speaker per channel, a file may have the same audio in two channels, or each speaker at low
volume in the other's channel (crosstalk). Such speech would be transcribed twice. A channel is
therefore silenced where it repeats another channel. To find repetitions, windows of both channels
are correlated at short delays and with either sign. A window in which the channel's own speaker
talks as well does not correlate and is kept.

Decisions are made for windows of a fixed length, so that they do not depend on a library's block
size.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.containers import Bytes, read_wav_header
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


def declared_layout(file_format: str, audio: Bytes, channels: int) -> Layout:
    """Return the layout of a WAV file with a channel mask, or the default of FLAC."""
    if file_format == "FLAC":
        return _FLAC_LAYOUTS.get(channels, UNKNOWN)
    header = read_wav_header(audio)
    if header is None or header.tag != _EXTENSIBLE or len(header.format) < 24:
        return UNKNOWN
    mask = int.from_bytes(header.format[20:24], "little")
    names = tuple(name for bit, name in enumerate(_MASK_NAMES) if mask >> bit & 1)
    return names if len(names) == channels else UNKNOWN


def known_layout(names: Layout) -> Layout:
    """Return the layout if all its channels have a weight, else the unknown layout."""
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


Block = tuple[int, Layout, Samples]
"""The rate in Hz, the channel layout, and samples, float32 (n, channels)."""

COLUMNS = 3
"""The mix, the centre alone, and the mix without the centre."""

_WINDOWS_PER_S = 2
_ENERGY_DECAY = 0.5  # decay per window of the energies
_PAUSE_RATIO = 0.01  # energy relative to the previous windows; a window below it has no speech
# The mix's energy, relative to the sum of the channels' energies. Below the first ratio one
# channel replaces the mix; from the second ratio on the mix returns.
_CANCELLED_RATIO = 0.15
_RESTORED_RATIO = 0.4
_SWITCH_RATIO = 2.0  # energy ratio above which another channel replaces the selected one
_SILENCE = 1e-8  # mean square: 80 dB below full scale

_REPEAT_WINDOWS_PER_S = 4
_RATE = 4_000  # approximate rate in Hz at which channels are compared
_MAX_DELAY_S = 0.02
# Minimum squared correlation of a repetition, after a window with speech and after a repetition.
_MIN_COPY_CORRELATION = (0.9, 0.6)
# The same for audio that is much quieter than the other channel's.
_MIN_LEAK_CORRELATION = (0.4, 0.25)
_MAX_LEAK_RATIO = 0.1  # energy ratio below which audio is much quieter
# Energy ratio above which the louder of two copies is kept, not the first one.
_LOUDER_COPY_RATIO = 4.0
_REPEAT_SILENCE = 1e-9  # mean square: 90 dB below full scale
_REPEAT_PAUSE_RATIO = 1e-3  # energy relative to the loudest window; a window below it has no speech
_LOUDEST_DECAY = 0.998  # decay per window of the loudest window's energy

_Signals = npt.NDArray[np.float64]

_BLOCK = 250 * FRAME  # samples per decision: 8 s
_MIX, _CENTRE, _REST = range(3)  # columns from `serve.speech.channels`
_MIN_CENTRE_PROB = 0.5  # minimum probability of speech in the centre
_MIN_REST_PROB = 0.6  # the same in the rest, higher because music may look like speech
_ECHO_FRAMES = 10  # frames around speech in the centre in which the rest may have its echo
_MIN_CENTRE_FRAMES = 8  # minimum frames of speech in the centre for a decision
_MIN_OTHER_FRAMES = 25  # minimum frames of other speech that keep the mix: 0.8 s
_MIN_PROB_LEAD = 0.15  # minimum lead of the centre's mean probability


def mix(
    blocks: Iterator[Block], channel: int, warn: Callable[[str], None]
) -> Iterator[tuple[int, Samples]]:
    """Mix the channels of a file's blocks, or select one channel.

    Args:
        blocks: the blocks in order; rate, layout and channels may change.
        channel: the index of the only channel; -1: mix all.
        warn: called at the end if channels or repetitions were dropped.

    Yields:
        The rate, and float32 (n,), or (n, COLUMNS) if the file begins with a front centre.
    """
    first = next(blocks, None)
    if first is None:
        return
    _, layout, block = first
    blocks = itertools.chain([first], blocks)
    if channel < 0:
        yield from _Downmix(centre(layout, block.shape[1]) is not None).mix_blocks(blocks, warn)
    else:
        yield from _OwnChannel(channel).filter_blocks(blocks, warn)


def _by_kind(
    blocks: Iterable[Block],
) -> Iterator[tuple[tuple[int, Layout, int], Iterator[Samples]]]:
    """Group adjacent blocks of the same rate, layout and number of channels."""
    groups = itertools.groupby(blocks, lambda block: (block[0], block[1], block[2].shape[1]))
    return ((kind, (samples for *_, samples in group)) for kind, group in groups)


def regroup(blocks: Iterable[Samples], length: int) -> Iterator[Samples]:
    """Join blocks, and cut them into blocks of `length`; the last one may be shorter."""
    buffered, count = list[Samples](), 0
    for block in blocks:
        buffered.append(block)
        count += len(block)
        if count >= length:
            samples = np.concatenate(buffered) if len(buffered) > 1 else block
            end = count - count % length
            buffered, count = [samples[end:]], count - end
            for start in range(0, end, length):
                yield samples[start : start + length]
    if count:
        yield np.concatenate(buffered)


def crossfade(old: Samples, new: Samples, rate: int) -> Samples:
    """Crossfade from old to new samples, both float32 (n,), over the first 10 ms."""
    n_fade = min(len(new), max(1, rate // 100))
    ramp = np.linspace(0, 1, n_fade, dtype=np.float32)
    return np.concatenate([old[:n_fade] * (1 - ramp) + new[:n_fade] * ramp, new[n_fade:]])


class _Downmix:
    """A mixer of a file's channels.

    Args:
        columns: whether to return COLUMNS instead of one channel.
    """

    def __init__(self, columns: bool) -> None:
        self._columns = columns
        self._energies: npt.NDArray[np.float64] = np.zeros(0)  # weighted, by channel
        self._recent_peak = 0.0
        self._fallback: int | None = None  # the channel used instead of the mix
        self._total_s = self._cancelled_s = 0.0

    def mix_blocks(
        self, blocks: Iterable[Block], warn: Callable[[str], None]
    ) -> Iterator[tuple[int, Samples]]:
        for (rate, layout, channels), group in _by_kind(blocks):
            if channels > 1 or self._columns:
                for window in regroup(group, max(1, rate // _WINDOWS_PER_S)):
                    yield rate, self._mix(rate, layout, window)
            else:
                for block in group:
                    self._total_s += len(block) / rate
                    yield rate, block[:, 0]
        if self._cancelled_s:
            warn(
                f"the channels cancel each other (opposite phase) in {self._cancelled_s:.1f} of "
                f"{self._total_s:.1f} s; only the louder channel is transcribed there"
            )

    def _mix(self, rate: int, layout: Layout, window: Samples) -> Samples:
        channels = window.shape[1]
        gains = weights(layout, channels)
        mean: Samples = window.mean(axis=1, dtype=np.float32) if gains is None else window @ gains
        mono = self._mix_or_fallback(rate, window, mean, gains)
        if not self._columns:
            return mono
        centre_index = centre(layout, channels)
        if centre_index is None:  # the layout has changed
            return np.stack([mono, np.zeros_like(mono), mono], axis=1)
        gain = 1 / channels if gains is None else float(gains[centre_index])
        rest = (mean - gain * window[:, centre_index]) / (1 - gain) if gain < 1 else 0 * mean
        return np.stack([mono, window[:, centre_index], rest], axis=1)

    def _mix_or_fallback(
        self, rate: int, window: Samples, mean: Samples, gains: Samples | None
    ) -> Samples:
        """Return the mix, or one channel if the channels cancel each other."""
        channels = window.shape[1]
        self._total_s += len(window) / rate
        if channels == 1:
            return mean
        channel_gains = np.full(channels, 1 / channels) if gains is None else gains
        if len(self._energies) != channels:
            self._energies, self._recent_peak, self._fallback = np.zeros(channels), 0.0, None
        previous = self._fallback
        with np.errstate(all="ignore"):  # invalid values are rejected later
            energies = np.einsum("ij,ij->j", window, window, dtype=np.float64)
            if energies.max() > _SILENCE * len(window):
                self._choose_fallback(float(np.dot(mean, mean)), energies * channel_gains**2)
        if self._fallback is not None:
            self._cancelled_s += len(window) / rate
        output = mean if self._fallback is None else window[:, self._fallback]
        if previous == self._fallback:
            return output
        return crossfade(mean if previous is None else window[:, previous], output, rate)

    def _choose_fallback(self, mix_energy: float, energies: npt.NDArray[np.float64]) -> None:
        """Select the mix or one channel from a window's energies."""
        channel_energy = float(energies.sum())
        self._recent_peak = max(channel_energy, _ENERGY_DECAY * self._recent_peak)
        if not channel_energy > _PAUSE_RATIO * self._recent_peak:
            return  # no speech, or only in channels with weight 0
        self._energies = _ENERGY_DECAY * self._energies + energies
        if mix_energy < _CANCELLED_RATIO * channel_energy:
            loudest, current = int(self._energies.argmax()), self._fallback
            if current is None or self._energies[loudest] > _SWITCH_RATIO * self._energies[current]:
                self._fallback = loudest
        elif not mix_energy < _RESTORED_RATIO * channel_energy:
            self._fallback = None


class _OwnChannel:
    """A filter that selects one channel and silences its repetitions of other channels.

    Args:
        channel: the channel's index, from 0 on.
    """

    def __init__(self, channel: int) -> None:
        self._channel = channel
        # Whether this channel is kept if another one is its copy, by the other channel.
        self._is_original: dict[int, bool] = {}
        self._loudest = 0.0
        self._repeats = False
        self._total_s = self._repeated_s = 0.0
        self._copied: set[int] = set()  # channels that this one repeats

    def filter_blocks(
        self, blocks: Iterable[Block], warn: Callable[[str], None]
    ) -> Iterator[tuple[int, Samples]]:
        """Yield the channel's windows; silence repetitions next to other repetitions."""
        previous: tuple[int, Samples, bool] | None = None
        window: tuple[int, Samples, bool] | None = None
        was_silent = False
        for following in itertools.chain(self._windows_with_repeats(blocks), [None]):
            if window is not None:
                rate, samples, repeats = window
                now_silent = repeats and (previous or window)[2] and (following or window)[2]
                silence = np.zeros_like(samples)
                output = silence if now_silent else samples
                if now_silent != was_silent:
                    output = crossfade(silence if was_silent else samples, output, rate)
                yield rate, output
                was_silent = now_silent
            previous, window = window, following
        if self._copied:
            sources = " and ".join(str(channel + 1) for channel in sorted(self._copied))
            warn(
                f"channel {self._channel + 1} repeats channel {sources} in {self._repeated_s:.1f} "
                f"of {self._total_s:.1f} s, as a copy or as crosstalk; the repetition is not "
                "transcribed"
            )

    def _windows_with_repeats(self, blocks: Iterable[Block]) -> Iterator[tuple[int, Samples, bool]]:
        """Yield the rate and samples of each window, and whether it is a repetition."""
        for (rate, *_), group in _by_kind(blocks):
            for window in regroup(group, max(1, rate // _REPEAT_WINDOWS_PER_S)):
                self._total_s += len(window) / rate
                self._repeats = self._is_repeated(rate, window)
                yield rate, window[:, self._channel], self._repeats

    def _is_repeated(self, rate: int, window: Samples) -> bool:
        with np.errstate(all="ignore"):  # invalid values are rejected later
            signals = _downsample(window, rate)
            energies = np.einsum("ij,ij->j", signals, signals)
        own_energy = float(energies[self._channel])
        self._loudest = max(_LOUDEST_DECAY * self._loudest, own_energy)
        if not own_energy > _REPEAT_SILENCE * len(signals):
            return self._repeats
        source = next(
            (
                other
                for other in range(window.shape[1])
                if other != self._channel and self._is_copy(signals, energies, other, rate)
            ),
            None,
        )
        if own_energy <= _REPEAT_PAUSE_RATIO * self._loudest:  # no speech
            return self._repeats or source is not None
        if source is not None:
            self._copied.add(source)
            self._repeated_s += len(window) / rate
        return source is not None

    def _is_copy(self, signals: _Signals, energies: _Signals, other: int, rate: int) -> bool:
        """Return whether a window repeats another channel's; only one of the two channels does."""
        own_energy, other_energy = float(energies[self._channel]), float(energies[other])
        if not other_energy > 0:
            return False
        step = max(1, rate // _RATE)
        first, second = sorted((self._channel, other))
        correlation = _max_correlation(
            signals[:, first], signals[:, second], round(_MAX_DELAY_S * rate / step)
        ) / (own_energy * other_energy)
        if correlation > _MIN_COPY_CORRELATION[False]:
            if own_energy > _LOUDER_COPY_RATIO * other_energy:
                self._is_original[other] = True
            elif other_energy > _LOUDER_COPY_RATIO * own_energy:
                self._is_original[other] = False
        if own_energy < _MAX_LEAK_RATIO * other_energy:
            return correlation > _MIN_LEAK_CORRELATION[self._repeats]
        is_original = self._is_original.get(other, self._channel < other)
        is_louder = own_energy > _LOUDER_COPY_RATIO * other_energy
        return correlation > _MIN_COPY_CORRELATION[self._repeats] and not (is_original or is_louder)


def _downsample(window: Samples, rate: int) -> _Signals:
    """Downsample the channels and remove their mean; returns float64 (m, channels)."""
    step = min(max(1, rate // _RATE), len(window))
    n_steps = len(window) // step
    blocks = window[: n_steps * step].reshape(n_steps, step, -1)
    downsampled: _Signals = blocks.mean(axis=1, dtype=np.float64)
    downsampled -= downsampled.mean(axis=0)
    return downsampled


def _max_correlation(a: _Signals, b: _Signals, delay: int) -> float:
    """Return the maximum squared correlation of two signals at delays of up to `delay` samples."""
    size = 1 << (2 * len(a) - 1).bit_length()
    products = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    delayed = np.concatenate([products[: delay + 1], products[-delay:]]) if delay else products[:1]
    return float((delayed**2).max())


def select_column(
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
    column, column_samples = _MIX, {_MIX: 0, _CENTRE: 0}
    with contextlib.closing(blocks):
        first = next(blocks, None)
        if first is None:
            return
        if first.ndim == 1:
            yield first
            yield from blocks
            return
        detectors = {i: VadModel() for i in (_CENTRE, _REST)}
        for block in regroup(itertools.chain([first], blocks), _BLOCK):
            padded = np.pad(block, ((0, -len(block) % FRAME), (0, 0)))
            centre, rest = (detectors[i].probabilities(padded[:, i]) for i in (_CENTRE, _REST))
            column = _choose_column(centre, rest, column)
            column_samples[column] += len(block)
            yield block[:, column].copy()
        if column_samples[_CENTRE]:
            centre_s = column_samples[_CENTRE] / SAMPLE_RATE
            total_s = sum(column_samples.values()) / SAMPLE_RATE
            warn(
                f"only the front centre channel has speech in {centre_s:.1f} of {total_s:.1f} s; "
                "the other channels are dropped there"
            )


def _choose_column(centre: Probabilities, rest: Probabilities, previous: int) -> int:
    """Choose a block's column from the speech probabilities of the centre and the rest."""
    centre_speech, rest_speech = centre >= _MIN_CENTRE_PROB, rest >= _MIN_REST_PROB
    n_near = np.convolve(centre_speech, np.ones(2 * _ECHO_FRAMES + 1))
    near_centre_speech = n_near[_ECHO_FRAMES : _ECHO_FRAMES + len(centre_speech)] > 0
    if np.count_nonzero(rest_speech & ~near_centre_speech) >= _MIN_OTHER_FRAMES:
        return _MIX
    n_voice = np.count_nonzero(centre_speech)
    if n_voice < _MIN_CENTRE_FRAMES:
        return previous
    only_in_centre = 2 * np.count_nonzero(rest_speech & centre_speech) <= n_voice
    is_clearer = centre[centre_speech].mean() > rest[centre_speech].mean() + _MIN_PROB_LEAD
    return _CENTRE if only_in_centre or is_clearer else _MIX
