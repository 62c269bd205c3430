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

`pack` removes silence before audio is cut, so that windows are full of speech. `cut_stretches` cuts
selected intervals only. `Bandwidth` detects audio that lacks the frequencies of speech. Audio with
a sample rate of 1 kHz has nothing above 500 Hz, even if it is resampled to a higher rate. Whisper
hallucinates sentences for it at every temperature.
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
from serve.speech.windows import AudioWindow, Pause, Stretch

_EARLIEST_CUT = WINDOW_SAMPLES // 2
_SHORTEST_REST = SAMPLE_RATE  # minimum samples of the last window; fewer are not recognisable
_SURE_SAMPLES = WINDOW_SAMPLES + _SHORTEST_REST  # audio after these samples changes no cut
_FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_SMOOTH_FRAMES = 15  # 0.3 s
_PAUSE_DB = 6.0  # above the quietest frame
_DEEPEST_DB = 40.0  # below the loudest frame
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
        self._held = [np.zeros(0, np.float32)]
        self._count = 0  # samples held

    def push(self, block: Samples) -> Iterator[AudioWindow]:
        """Add a block, and yield the windows that are certain now."""
        self._held.append(block)
        self._count += len(block)
        if self._count >= _SURE_SAMPLES:
            yield from self._cut(_SURE_SAMPLES)

    def finish(self) -> Iterator[AudioWindow]:
        """Yield the remaining windows."""
        yield from self._cut(WINDOW_SAMPLES + 1)
        yield AudioWindow(self._start / SAMPLE_RATE, self._held[0], last=True)

    def _cut(self, enough: int) -> Iterator[AudioWindow]:
        """Yield windows while at least `enough` samples are held."""
        rest = np.concatenate(self._held)
        self._held, self._count = [rest], len(rest)
        while len(rest) >= enough:
            end = _first_cut(rest)
            window = AudioWindow(self._start / SAMPLE_RATE, rest[:end].copy())
            self._start, rest = self._start + end, rest[end:]
            self._held, self._count = [rest], len(rest)
            yield window


def _first_cut(samples: Samples) -> int:
    """Return the end of the first window of more than 30 s of samples; it depends on 31 s."""
    latest = min(WINDOW_SAMPLES, len(samples) - _SHORTEST_REST)
    return _EARLIEST_CUT + _quiet_place(samples[_EARLIEST_CUT:latest])


def _quiet_place(region: Samples) -> int:
    """Return the index of the best sample to cut at; region is (n,), at least a second."""
    frames = region[: len(region) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
    # Repeat the edge frames; zeros would make the edges look quieter than they are.
    half = _SMOOTH_FRAMES // 2
    padded = np.pad(power, half, mode="edge")
    smooth = np.convolve(padded, np.full(_SMOOTH_FRAMES, 1.0 / _SMOOTH_FRAMES), mode="valid")
    level_db = 10.0 * np.log10(np.maximum(smooth, _SILENCE))
    level_db = np.maximum(level_db, level_db.max() - _DEEPEST_DB)
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


APART_S = 10.0
"""A longer pause starts a new window, because another speaker or language may follow."""
BREATHER = 60 * SAMPLE_RATE  # samples without a window after which other requests get a turn


def cut_long(
    blocks: Iterable[Samples], listener: Callable[[], SpeechFilter]
) -> Iterator[AudioWindow | None]:
    """Cut audio into windows, and remove silence if it is longer than one window.

    Audio that fits into one window is kept whole if it has any speech, and dropped otherwise.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: creates the listener.

    Yields:
        See `cut_and_listen` and `pack`.
    """
    blocks, held, count = iter(blocks), deque[Samples](), 0
    for block in blocks:
        held.append(block)
        count += len(block)
        if count > WINDOW_SAMPLES:
            yield from pack(itertools.chain(_emptied(held), blocks), listener())
            return
    for window in cut_and_listen(held, listener()):
        if not window.voice:
            left_out_s = window.duration_s
            window = dataclasses.replace(window, samples=window.samples[:0], left_out_s=left_out_s)
        yield window


def cut_and_listen(blocks: Iterable[Samples], listener: SpeechFilter) -> Iterator[AudioWindow]:
    """Cut the whole audio like `cut`, and set each window's speech intervals by VAD.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: detects speech; it gets each block before the window that ends in it.
    """

    def heard() -> Iterator[Samples]:
        for block in blocks:
            listener.push(block)
            yield block
        listener.finish()

    for window in cut(heard()):
        start = round(window.start_s * SAMPLE_RATE)
        voice = listener.spoken(start, start + len(window.samples))
        inside = ((first - start, last - start) for first, last in voice)
        yield dataclasses.replace(window, voice=tuple(_seconds(inside)))


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
        parts = ((max(start, start_s), min(end, end_s)) for start, end in voice)
        inside = tuple((start - start_s, end - start_s) for start, end in parts if start < end)
        yield dataclasses.replace(window, voice=inside)


def _seconds(stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[float, float]]:
    return ((start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in stretches)


def _emptied(held: deque[Samples]) -> Iterator[Samples]:
    """Yield and free each block: together they are a megabyte, and the request takes minutes."""
    while held:
        yield held.popleft()


def pack(blocks: Iterable[Samples], listener: SpeechFilter) -> Iterator[AudioWindow | None]:
    """Cut the speech in audio into windows of at most 30 s, as early as possible.

    Speech intervals are joined within a window unless they are `APART_S` apart, and cut like in
    `cut`, where they are quietest. Each window lists the pauses that were cut out, so that its
    times can be mapped back.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: detects speech.

    Yields:
        Windows, and None after each minute of audio without a window. Audio without speech gives
        one window without samples.
    """
    packer, waited = _Packer(listener), 0
    for block in blocks:
        waited += len(block)
        for speech in listener.push(block):
            for window in packer.push(speech.start, speech.samples):
                waited = 0
                yield window
        if waited >= BREATHER:
            waited = 0
            yield None
    for speech in listener.finish():
        yield from packer.push(speech.start, speech.samples)
    yield from packer.finish()


class _Packer:
    """A cutter of speech that maps windows back to the recording; all units are samples."""

    def __init__(self, listener: SpeechFilter) -> None:
        self._listener = listener
        self._cutter = Cutter()
        self._received = self._windowed = 0  # speech received, and speech in windows
        self._until = 0  # end of the received speech in the recording
        # Pauses that are not in a window yet: position in the speech, and length.
        self._pauses: deque[tuple[int, int]] = deque()
        self._removed = 0  # sum of the pauses before the next window

    def push(self, start: int, samples: Samples) -> Iterator[AudioWindow]:
        """Add the next speech, which begins at sample `start` of the recording."""
        if (start - self._until) / SAMPLE_RATE >= APART_S and self._received > self._windowed:
            for window in self._cutter.finish():
                yield self._placed(dataclasses.replace(window, last=False), 0)
            self._cutter = Cutter()
        if start > self._until:
            self._pauses.append((self._received, start - self._until))
        self._received += len(samples)
        self._until = start + len(samples)
        for window in self._cutter.push(samples):
            yield self._placed(window, 0)

    def finish(self) -> Iterator[AudioWindow]:
        """Yield the remaining windows at the audio's end."""
        for window in self._cutter.finish():
            yield self._placed(window, self._listener.received - self._until if window.last else 0)

    def _placed(self, window: AudioWindow, after: int) -> AudioWindow:
        """Map a window of speech to the recording; `after` samples of silence follow it."""
        begin, self._windowed = self._windowed, self._windowed + len(window.samples)
        before = 0
        while self._pauses and self._pauses[0][0] <= begin:
            before += self._pauses.popleft()[1]
        inner_pauses = []
        while self._pauses and self._pauses[0][0] < self._windowed:
            inner_pauses.append(self._pauses.popleft())
        self._removed += before
        start = begin + self._removed
        inner_samples = sum(length for _, length in inner_pauses)
        self._removed += inner_samples
        return AudioWindow(
            start / SAMPLE_RATE,
            window.samples,
            window.last,
            pauses=tuple(
                Pause((offset - begin) / SAMPLE_RATE, length / SAMPLE_RATE)
                for offset, length in inner_pauses
            ),
            margin_s=self._listener.margin_s,
            left_out_s=(before + inner_samples + after) / SAMPLE_RATE,
            voice=tuple(_seconds(self._voice(start, begin, inner_pauses))),
        )

    def _voice(
        self, start: int, begin: int, inside: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield a window's speech intervals, in samples from its start.

        Args:
            start: the window's start in the recording.
            begin: the window's start in the speech; it ends at `_windowed`.
            inside: position in the speech, and length, of each pause cut out of the window.
        """
        offset = 0
        for place, length in (*inside, (self._windowed, 0)):
            end = start + place - begin - offset
            for first, last in self._listener.spoken(start, end):
                yield first - start + offset, last - start + offset
            start, offset = end + length, place - begin


CutOne = Callable[[Iterable[Samples]], Iterator[AudioWindow | None]]
"""A function that cuts a whole recording, such as `cut` or `pack`."""


def cut_stretches(
    blocks: Iterable[Samples], stretches: Sequence[Stretch], cut_one: CutOne
) -> Iterator[AudioWindow | None]:
    """Cut each interval of the audio into its own windows.

    Blocks are read only up to the end of the last interval. Intervals beyond the audio's end are
    empty.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        stretches: at least one interval, in order.
        cut_one: called with the blocks of each interval.

    Yields:
        Windows; only the last one may have no samples. None as in `pack`.
    """
    reader, left_out_s = _Reader(blocks), 0.0
    for number, (start_s, end_s) in enumerate(stretches, start=1):
        before = reader.offset
        yield from _skipped(reader.until(_sample(start_s)))
        left_out_s += (reader.offset - before) / SAMPLE_RATE
        begin_s = reader.offset / SAMPLE_RATE
        for window in cut_one(reader.until(_sample(end_s))):
            if window is None:
                yield None
                continue
            left_out_s += window.left_out_s
            last = window.last and number == len(stretches)
            if len(window.samples) or last:
                yield dataclasses.replace(
                    window, start_s=begin_s + window.start_s, last=last, left_out_s=left_out_s
                )
                left_out_s = 0.0


def _sample(time_s: float) -> int:
    return round(time_s * SAMPLE_RATE) if math.isfinite(time_s) else sys.maxsize


def _skipped(blocks: Iterable[Samples]) -> Iterator[None]:
    """Discard blocks; yield None after each `BREATHER` samples."""
    waited = 0
    for block in blocks:
        waited += len(block)
        if waited >= BREATHER:
            waited = 0
            yield None


class _Reader:
    """A reader of blocks that can stop at any sample."""

    def __init__(self, blocks: Iterable[Samples]) -> None:
        self.offset = 0  # samples read
        self._blocks = iter(blocks)
        self._rest = np.zeros(0, np.float32)

    def until(self, end: int) -> Iterator[Samples]:
        """Yield blocks up to a sample of the recording, or to its end."""
        while self.offset < end:
            if not len(self._rest):
                block = next(self._blocks, None)
                if block is None:
                    return
                self._rest = block
            wanted = end - self.offset
            part, self._rest = self._rest[:wanted], self._rest[wanted:]
            self.offset += len(part)
            yield part


_SPECTRUM = 1024  # samples
_HZ = SAMPLE_RATE / _SPECTRUM  # width of a bin
_SPEECH_HZ = 1_050  # speech always has energy above this frequency
_HUM_HZ = 60  # lower frequencies (mains hum, offsets) are ignored
_SHARE = 1e-6  # minimum share of the total energy: -60 dB
_LOUD = 1e-10  # mean square: 100 dB below full scale
_MANY = 64  # frames per batch
_HANN = np.hanning(_SPECTRUM).astype(np.float32)


class Bandwidth:
    """A monitor of a recording's blocks that stops once it has found high frequencies."""

    def __init__(self) -> None:
        self._wide = False
        self._energies = np.zeros(_SPECTRUM // 2 + 1)
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
        whole = len(samples) // _SPECTRUM
        self._rest = samples[whole * _SPECTRUM :].copy()
        frames = samples[: whole * _SPECTRUM].reshape(whole, _SPECTRUM)
        for offset in range(0, whole, _MANY):
            part = frames[offset : offset + _MANY]
            loud = part[np.einsum("ij,ij->i", part, part) > _LOUD * _SPECTRUM]
            if not len(loud):
                continue
            spectra = np.abs(np.fft.rfft(loud * _HANN)) ** 2
            self._energies += spectra.sum(axis=0)
            self._energies[: round(_HUM_HZ / _HZ)] = 0.0
            high = self._energies[round(_SPEECH_HZ / _HZ) :].sum()
            if high > _SHARE * self._energies.sum():
                self._wide, self._rest = True, self._rest[:0]
                return
