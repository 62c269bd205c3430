"""Cut audio into windows at quiet places, without a model.

OpenAI decodes a recording from left to right and continues at the last timestamp, so its windows
depend on each other. Here windows are cut in advance, so that they decode in parallel. See
`serve.speech.windows` for speech without text.

Every window but the last ends 15 s to 30 s after its start, in the longest pause of that range:
- Loudness is the power of 20 ms frames averaged over 0.3 s, so that a gap within or between words
  does not look like a pause.
- Frames within 6 dB of the quietest one count as pause. This works for clean and noisy recordings.
- Frames more than 40 dB below the loudest one are equally quiet, so that digital silence has no
  advantage over a pause with room noise.
- Pauses of 1 s and more are equally good, and the latest wins, because a window costs the same
  whatever its length.
- The cut is in the middle of a pause, or half a second before the speech after a long one. Speech
  without a pause is cut at its quietest place.

`pack` removes silence before audio is cut, so that windows are full of speech. `cut_intervals` cuts
selected intervals only. `Bandwidth` detects audio that lacks the frequencies of speech. Audio
that was recorded at 1 kHz has nothing above 500 Hz, even if it is resampled to a higher rate.
Whisper hallucinates sentences for it at every temperature.
"""

import dataclasses
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.vad import SpeechFilter
from serve.speech.windows import AudioWindow, Interval, Pause

_EARLIEST_CUT = WINDOW_SAMPLES // 2
_MIN_LAST_SAMPLES = SAMPLE_RATE  # minimum samples of the last window; Whisper needs a second
_CERTAIN_SAMPLES = WINDOW_SAMPLES + _MIN_LAST_SAMPLES  # later samples do not change the first cut
_FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_SMOOTH_FRAMES = 15  # 0.3 s
_PAUSE_DB = 6.0  # above the quietest frame
_MAX_RANGE_DB = 40.0  # below the loudest frame
_SILENCE = 1e-12  # mean square, below the last bit of 24-bit samples
_LONG_PAUSE_FRAMES = 50  # 1 s


def cut(blocks: Iterable[Samples]) -> Iterator[AudioWindow]:
    """Cut audio into adjacent windows of at most 30 s.

    A window is yielded as soon as its end is certain. The cuts do not depend on how the audio is
    split into blocks. The last window has at least 1 s unless it is the only one.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
    """
    cutter = Cutter()
    for block in blocks:
        yield from cutter.push(block)
    yield from cutter.finish()


class Cutter:
    """A buffer that cuts blocks into windows; see `cut`."""

    def __init__(self) -> None:
        self._start = 0  # index of the first held sample in the recording
        self._blocks_held = [np.zeros(0, np.float32)]
        self._count = 0  # samples held

    def push(self, block: Samples) -> Iterator[AudioWindow]:
        """Add a block, and yield the windows that are certain now."""
        self._blocks_held.append(block)
        self._count += len(block)
        if self._count >= _CERTAIN_SAMPLES:
            yield from self._cut(_CERTAIN_SAMPLES)

    def finish(self) -> Iterator[AudioWindow]:
        """Yield the remaining windows."""
        yield from self._cut(WINDOW_SAMPLES + 1)
        yield AudioWindow(self._start / SAMPLE_RATE, self._blocks_held[0], last=True)

    def _cut(self, min_samples: int) -> Iterator[AudioWindow]:
        """Yield windows while at least `min_samples` samples are held."""
        remaining = np.concatenate(self._blocks_held)
        self._blocks_held, self._count = [remaining], len(remaining)
        while len(remaining) >= min_samples:
            end = _first_cut(remaining)
            window = AudioWindow(self._start / SAMPLE_RATE, remaining[:end].copy())
            self._start, remaining = self._start + end, remaining[end:]
            self._blocks_held, self._count = [remaining], len(remaining)
            yield window


def _first_cut(samples: Samples) -> int:
    """Return the end of the first window in more than 30 s of samples; the first 31 s decide it."""
    latest = min(WINDOW_SAMPLES, len(samples) - _MIN_LAST_SAMPLES)
    return _EARLIEST_CUT + _quietest_sample(samples[_EARLIEST_CUT:latest])


def _quietest_sample(region: Samples) -> int:
    """Return the index of the best sample to cut at; region is (n,), at least a second."""
    frames = region[: len(region) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
    # Repeat the edge frames; zeros would make the edges look quieter than they are.
    half = _SMOOTH_FRAMES // 2
    padded = np.pad(power, half, mode="edge")
    smooth = np.convolve(padded, np.full(_SMOOTH_FRAMES, 1.0 / _SMOOTH_FRAMES), mode="valid")
    level_db = 10.0 * np.log10(np.maximum(smooth, _SILENCE))
    level_db = np.maximum(level_db, level_db.max() - _MAX_RANGE_DB)
    margin_db = min(_PAUSE_DB, (level_db.max() - level_db.min()) / 3)
    begin, end = _longest_pause(level_db <= level_db.min() + margin_db)
    # The middle, but never more than half a second before speech begins again.
    frames_before_speech = min((end - begin) / 2, _LONG_PAUSE_FRAMES / 2)
    return int((end - frames_before_speech) * _FRAME)


def _longest_pause(quiet: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first frame of the longest quiet run, and the frame after its last one.

    Runs of a second and more count as equally long; the last one wins among equals.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], quiet, [False]))))
    runs = edges.reshape(-1, 2)
    lengths = np.minimum(runs[:, 1] - runs[:, 0], _LONG_PAUSE_FRAMES)
    best = len(runs) - 1 - int(np.argmax(lengths[::-1]))  # argmax returns the first maximum
    return int(runs[best, 0]), int(runs[best, 1])


NEW_WINDOW_PAUSE_S = 10.0
"""A longer pause starts a new window, because another speaker or language may follow."""
YIELD_SAMPLES = 60 * SAMPLE_RATE  # samples without a window after which other requests get a turn


def cut_long(
    blocks: Iterable[Samples],
    speech_filter: SpeechFilter,
    *,
    keep_silence: bool = False,
    early: bool = False,
) -> Iterator[AudioWindow | None]:
    """Cut audio into windows, and remove silence if it is longer than one window.

    Audio that fits into one window is kept whole if it has any speech, and dropped otherwise.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        speech_filter: detects speech.
        keep_silence: whether no silence is removed.
        early: whether audio that fits into one window is yielded twice: at its first speech, or at
            once if silence is kept, with `voice_pending`, and again when all of it is searched for
            speech. It can be decoded meanwhile.

    Yields:
        See `cut_and_listen` and `pack`.
    """
    blocks, buffered, count = iter(blocks), deque[Samples](), 0
    for block in blocks:
        buffered.append(block)
        count += len(block)
        if count > WINDOW_SAMPLES:
            cut_more = cut_and_listen if keep_silence else pack
            yield from cut_more(itertools.chain(_drain(buffered), blocks), speech_filter)
            return
    samples, searched = np.concatenate([np.zeros(0, np.float32), *_drain(buffered)]), 0
    while early and searched < count:
        if keep_silence or speech_filter.spoken(0, searched):
            yield AudioWindow(0.0, samples, last=True, voice_pending=True)
            break
        speech_filter.push(samples[searched : searched + SAMPLE_RATE])
        searched += SAMPLE_RATE
    speech_filter.push(samples[searched:])
    speech_filter.finish()
    voice = tuple(_seconds(speech_filter.spoken(0, count)))
    if not (voice or keep_silence):
        samples = samples[:0]
    left_out_s = (count - len(samples)) / SAMPLE_RATE
    yield AudioWindow(0.0, samples, last=True, left_out_s=left_out_s, voice=voice)


def cut_and_listen(blocks: Iterable[Samples], speech_filter: SpeechFilter) -> Iterator[AudioWindow]:
    """Cut the whole audio like `cut`, and set each window's speech intervals by VAD.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        speech_filter: detects speech; it gets each block before the window that ends in the block.
    """

    def filtered() -> Iterator[Samples]:
        for block in blocks:
            speech_filter.push(block)
            yield block
        speech_filter.finish()

    for window in cut(filtered()):
        start = round(window.start_s * SAMPLE_RATE)
        voice = speech_filter.spoken(start, start + len(window.samples))
        intervals = ((first - start, last - start) for first, last in voice)
        yield dataclasses.replace(window, voice=tuple(_seconds(intervals)))


def cut_with_voice(
    blocks: Iterable[Samples], voice: Sequence[tuple[float, float]]
) -> Iterator[AudioWindow]:
    """Cut the whole audio like `cut`, and set each window's speech intervals from `voice`.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        voice: start and end in seconds of each speech interval, in order.
    """
    for window in cut(blocks):
        start_s, end_s = window.start_s, window.start_s + window.duration_s
        clipped = ((max(start, start_s), min(end, end_s)) for start, end in voice)
        intervals = tuple((start - start_s, end - start_s) for start, end in clipped if start < end)
        yield dataclasses.replace(window, voice=intervals)


def _seconds(intervals: Iterable[tuple[int, int]]) -> Iterator[tuple[float, float]]:
    return ((start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in intervals)


def _drain(blocks: deque[Samples]) -> Iterator[Samples]:
    """Yield and free each block: together they are a megabyte, and the request takes minutes."""
    while blocks:
        yield blocks.popleft()


def pack(blocks: Iterable[Samples], speech_filter: SpeechFilter) -> Iterator[AudioWindow | None]:
    """Cut the speech in audio into windows of at most 30 s, as early as possible.

    Speech intervals are joined within a window unless they are `NEW_WINDOW_PAUSE_S` apart. Cuts are
    at the quietest places, as in `cut`. Each window lists the pauses that were cut out, so that its
    times can be mapped back.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        speech_filter: detects speech.

    Yields:
        Windows, and None after each minute of audio without a window. Audio without speech gives
        one window without samples.
    """
    packer, samples_since_window = _Packer(speech_filter), 0
    for block in blocks:
        samples_since_window += len(block)
        for speech in speech_filter.push(block):
            for window in packer.push(speech.start, speech.samples):
                samples_since_window = 0
                yield window
        if samples_since_window >= YIELD_SAMPLES:
            samples_since_window = 0
            yield None
    for speech in speech_filter.finish():
        yield from packer.push(speech.start, speech.samples)
    yield from packer.finish()


class _Packer:
    """A cutter of speech that maps windows back to the recording; all units are samples."""

    def __init__(self, speech_filter: SpeechFilter) -> None:
        self._filter = speech_filter
        self._cutter = Cutter()
        self._received = self._in_windows = 0  # speech received, and speech in windows
        self._speech_end = 0  # end of the received speech in the recording
        # Pauses that are not in a window yet: position in the speech, and length.
        self._pauses: deque[tuple[int, int]] = deque()
        self._removed = 0  # sum of the pauses before the next window

    def push(self, start: int, samples: Samples) -> Iterator[AudioWindow]:
        """Add the next speech, which begins at sample `start` of the recording."""
        pause_s = (start - self._speech_end) / SAMPLE_RATE
        if pause_s >= NEW_WINDOW_PAUSE_S and self._received > self._in_windows:
            for window in self._cutter.finish():
                yield self._map_window(dataclasses.replace(window, last=False), 0)
            self._cutter = Cutter()
        if start > self._speech_end:
            self._pauses.append((self._received, start - self._speech_end))
        self._received += len(samples)
        self._speech_end = start + len(samples)
        for window in self._cutter.push(samples):
            yield self._map_window(window, 0)

    def finish(self) -> Iterator[AudioWindow]:
        """Yield the remaining windows at the audio's end."""
        for window in self._cutter.finish():
            skipped = self._filter.received - self._speech_end if window.last else 0
            yield self._map_window(window, skipped)

    def _map_window(self, window: AudioWindow, silence_after: int) -> AudioWindow:
        """Map a window of speech to the recording.

        Args:
            window: the window, with times in the speech.
            silence_after: samples of silence after it, at the audio's end.
        """
        begin, self._in_windows = self._in_windows, self._in_windows + len(window.samples)
        silence_before = 0
        while self._pauses and self._pauses[0][0] <= begin:
            silence_before += self._pauses.popleft()[1]
        inner_pauses = []
        while self._pauses and self._pauses[0][0] < self._in_windows:
            inner_pauses.append(self._pauses.popleft())
        self._removed += silence_before
        start = begin + self._removed
        inner_silence = sum(length for _, length in inner_pauses)
        self._removed += inner_silence
        return AudioWindow(
            start / SAMPLE_RATE,
            window.samples,
            window.last,
            pauses=tuple(
                Pause((offset - begin) / SAMPLE_RATE, length / SAMPLE_RATE)
                for offset, length in inner_pauses
            ),
            margin_s=self._filter.margin_s,
            left_out_s=(silence_before + inner_silence + silence_after) / SAMPLE_RATE,
            voice=tuple(_seconds(self._voice(start, begin, inner_pauses))),
        )

    def _voice(
        self, start: int, begin: int, pauses: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield a window's speech intervals, in samples from its start.

        Args:
            start: the window's start in the recording.
            begin: the window's start in the speech; the window ends at `_in_windows`.
            pauses: position in the speech, and length, of each pause cut out of the window.
        """
        offset = 0
        for position, length in (*pauses, (self._in_windows, 0)):
            end = start + position - begin - offset
            for first, last in self._filter.spoken(start, end):
                yield first - start + offset, last - start + offset
            start, offset = end + length, position - begin


CutFunction = Callable[[Iterable[Samples]], Iterator[AudioWindow | None]]
"""A function that cuts a whole recording, such as `cut` or `pack`."""


def cut_intervals(
    blocks: Iterable[Samples], intervals: Sequence[Interval], cut_interval: CutFunction
) -> Iterator[AudioWindow | None]:
    """Cut each interval of the audio into its own windows.

    Blocks are read only up to the end of the last interval. Intervals beyond the audio's end are
    empty.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        intervals: at least one interval, in order.
        cut_interval: called with the blocks of each interval.

    Yields:
        Windows; only the last one may have no samples. None as in `pack`.
    """
    reader, left_out_s = _Reader(blocks), 0.0
    for index, (start_s, end_s) in enumerate(intervals, start=1):
        previous_offset = reader.offset
        yield from _skip(reader.until(_sample(start_s)))
        left_out_s += (reader.offset - previous_offset) / SAMPLE_RATE
        begin_s = reader.offset / SAMPLE_RATE
        for window in cut_interval(reader.until(_sample(end_s))):
            if window is None:
                yield None
                continue
            left_out_s += window.left_out_s
            last = window.last and index == len(intervals)
            if len(window.samples) or last:
                yield dataclasses.replace(
                    window, start_s=begin_s + window.start_s, last=last, left_out_s=left_out_s
                )
                left_out_s = 0.0


def _sample(time_s: float) -> int:
    return round(time_s * SAMPLE_RATE) if math.isfinite(time_s) else sys.maxsize


def _skip(blocks: Iterable[Samples]) -> Iterator[None]:
    """Discard blocks; yield None after each `YIELD_SAMPLES` samples."""
    samples = 0
    for block in blocks:
        samples += len(block)
        if samples >= YIELD_SAMPLES:
            samples = 0
            yield None


class _Reader:
    """A reader of blocks that can stop at any sample."""

    def __init__(self, blocks: Iterable[Samples]) -> None:
        self.offset = 0  # samples read
        self._blocks = iter(blocks)
        self._remaining = np.zeros(0, np.float32)

    def until(self, end: int) -> Iterator[Samples]:
        """Yield blocks up to a sample of the recording, or to its end."""
        while self.offset < end:
            if not len(self._remaining):
                block = next(self._blocks, None)
                if block is None:
                    return
                self._remaining = block
            n_samples = end - self.offset
            part, self._remaining = self._remaining[:n_samples], self._remaining[n_samples:]
            self.offset += len(part)
            yield part


_SPECTRUM = 1024  # samples
_BIN_HZ = SAMPLE_RATE / _SPECTRUM  # width of a bin
_SPEECH_HZ = 1_050  # speech always has energy above this frequency
_HUM_HZ = 60  # lower frequencies (mains hum, offsets) are ignored
_MIN_ENERGY_SHARE = 1e-6  # minimum share of the total energy: -60 dB
_MIN_POWER = 1e-10  # mean square: 100 dB below full scale
_FRAMES_PER_BATCH = 64  # frames per batch
_HANN = np.hanning(_SPECTRUM).astype(np.float32)


class Bandwidth:
    """A monitor of a recording's blocks that stops once it has found high frequencies."""

    def __init__(self) -> None:
        self._has_high = False
        self._energies = np.zeros(_SPECTRUM // 2 + 1)
        self._remaining = np.zeros(0, np.float32)

    def watch(self, blocks: Iterable[Samples]) -> Iterator[Samples]:
        """Analyze blocks, float32 (n,) at 16 kHz, and yield them unchanged."""
        for block in blocks:
            if not self._has_high:
                self._analyze(block)
            yield block

    @property
    def narrow(self) -> bool:
        """Whether all audio so far is too low for speech."""
        return not self._has_high and bool(self._energies.any())

    def warning(self) -> str:
        """Return a warning if the audio is too low for speech, else ""."""
        if not self.narrow:
            return ""
        above = np.cumsum(self._energies[::-1])[::-1] > _MIN_ENERGY_SHARE * self._energies.sum()
        highest_hz = (np.flatnonzero(above)[-1] - 1) * _BIN_HZ  # a tone spans two bins
        return (
            "the audio has no frequencies above "
            f"{100 * max(1, np.ceil(highest_hz / 100)):.0f} Hz, but speech needs 300 to 3400 Hz: "
            "the text may be hallucinated; send the recording at a sample rate of at least 8000 Hz"
        )

    def _analyze(self, block: Samples) -> None:
        samples = np.concatenate([self._remaining, block])
        n_frames = len(samples) // _SPECTRUM
        self._remaining = samples[n_frames * _SPECTRUM :].copy()
        frames = samples[: n_frames * _SPECTRUM].reshape(n_frames, _SPECTRUM)
        for offset in range(0, n_frames, _FRAMES_PER_BATCH):
            part = frames[offset : offset + _FRAMES_PER_BATCH]
            loud = part[np.einsum("ij,ij->i", part, part) > _MIN_POWER * _SPECTRUM]
            if not len(loud):
                continue
            spectra = np.abs(np.fft.rfft(loud * _HANN)) ** 2
            self._energies += spectra.sum(axis=0)
            self._energies[: round(_HUM_HZ / _BIN_HZ)] = 0.0
            high = self._energies[round(_SPEECH_HZ / _BIN_HZ) :].sum()
            if high > _MIN_ENERGY_SHARE * self._energies.sum():
                self._has_high, self._remaining = True, self._remaining[:0]
                return
