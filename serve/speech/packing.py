"""Remove silence before audio is cut, so that windows are full of speech."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from serve.contract.messages import Samples
from serve.speech.cutting import Cutter, cut
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.timeline import Pause
from serve.speech.vad import SpeechFilter
from serve.speech.windows import AudioWindow

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
        yield window if window.voice else _left_out(window)


def cut_and_listen(blocks: Iterable[Samples], listener: SpeechFilter) -> Iterator[AudioWindow]:
    """Cut the whole audio like `cut`, and set each window's speech intervals by VAD.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: detects speech; it gets each block before the window that ends in it.
    """
    cutter = Cutter()
    for block in blocks:
        listener.push(block)
        for window in cutter.push(block):
            yield _with_voice(window, listener)
    listener.finish()
    for window in cutter.finish():
        yield _with_voice(window, listener)


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


def _left_out(window: AudioWindow) -> AudioWindow:
    return dataclasses.replace(window, samples=window.samples[:0], left_out_s=window.duration_s)


def _with_voice(window: AudioWindow, listener: SpeechFilter) -> AudioWindow:
    start = round(window.start_s * SAMPLE_RATE)
    spoken = listener.spoken(start, start + len(window.samples))
    voice = ((first - start, last - start) for first, last in spoken)
    return dataclasses.replace(window, voice=tuple(_seconds(voice)))


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
        self._came = self._gone = 0  # speech received, and speech in windows
        self._until = 0  # end of the received speech in the recording
        # Pauses that are not in a window yet: position in the speech, and length.
        self._pauses: deque[tuple[int, int]] = deque()
        self._out = 0  # sum of the pauses before the next window

    def push(self, start: int, samples: Samples) -> Iterator[AudioWindow]:
        """Add the next speech, which begins at sample `start` of the recording."""
        if (start - self._until) / SAMPLE_RATE >= APART_S and self._came > self._gone:
            for window in self._cutter.finish():
                yield self._placed(dataclasses.replace(window, last=False), 0)
            self._cutter = Cutter()
        if start > self._until:
            self._pauses.append((self._came, start - self._until))
        self._came += len(samples)
        self._until = start + len(samples)
        for window in self._cutter.push(samples):
            yield self._placed(window, 0)

    def finish(self) -> Iterator[AudioWindow]:
        """Yield the remaining windows at the audio's end."""
        for window in self._cutter.finish():
            yield self._placed(window, self._listener.received - self._until if window.last else 0)

    def _placed(self, window: AudioWindow, after: int) -> AudioWindow:
        """Map a window of speech to the recording; `after` samples of silence follow it."""
        begin, self._gone = self._gone, self._gone + len(window.samples)
        before = 0
        while self._pauses and self._pauses[0][0] <= begin:
            before += self._pauses.popleft()[1]
        inside = []
        while self._pauses and self._pauses[0][0] < self._gone:
            inside.append(self._pauses.popleft())
        self._out += before
        start = begin + self._out
        lost = sum(length for _, length in inside)
        self._out += lost
        return AudioWindow(
            start / SAMPLE_RATE,
            window.samples,
            window.last,
            pauses=tuple(
                Pause((at - begin) / SAMPLE_RATE, length / SAMPLE_RATE) for at, length in inside
            ),
            margin_s=self._listener.margin_s,
            left_out_s=(before + lost + after) / SAMPLE_RATE,
            voice=tuple(_seconds(self._voice(start, begin, inside))),
        )

    def _voice(
        self, start: int, begin: int, inside: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield a window's speech intervals, in samples from its start.

        Args:
            start: the window's start in the recording.
            begin: the window's start in the speech; it ends at `_gone`.
            inside: position in the speech, and length, of each pause cut out of the window.
        """
        at = 0
        for place, length in (*inside, (self._gone, 0)):
            end = start + place - begin - at
            for first, last in self._listener.spoken(start, end):
                yield first - start + at, last - start + at
            start, at = end + length, place - begin
