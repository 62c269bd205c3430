"""Windows full of speech: what nobody says is left out before audio is cut."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from serve.contract.messages import Samples
from serve.speech.activity import Listener
from serve.speech.cutting import Cutter, cut
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.timeline import Pause
from serve.speech.windows import Window

APART_S = 10.0
"""Seconds left out, after which another may speak, elsewhere, in another language."""
BREATHER = 60 * SAMPLE_RATE  # samples without a window, after which others may have their turn


def cut_long(
    blocks: Iterable[Samples], listener: Callable[[], Listener]
) -> Iterator[Window | None]:
    """Cut audio into windows, and leave out what is not speech if it is longer than one.

    Audio that fits into one window is left whole where somebody speaks in it, however little; where
    nobody does, nothing of it is left.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: makes one for the audio.

    Yields:
        As `cut_and_listen`, or as `pack`.
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


def cut_and_listen(blocks: Iterable[Samples], listener: Listener) -> Iterator[Window]:
    """Cut all of the audio into windows, as `cut` does, and tell where in each somebody speaks.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: tells what is speech; it knows more of the audio than the windows hold.
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
) -> Iterator[Window]:
    """Cut all of the audio into windows, as `cut` does, where it is known when somebody speaks.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        voice: start and end in seconds of each stretch in which somebody speaks, in order.
    """
    for window in cut(blocks):
        start_s, end_s = window.start_s, window.start_s + window.duration_s
        parts = ((max(start, start_s), min(end, end_s)) for start, end in voice)
        inside = tuple((start - start_s, end - start_s) for start, end in parts if start < end)
        yield dataclasses.replace(window, voice=inside)


def _left_out(window: Window) -> Window:
    return dataclasses.replace(window, samples=window.samples[:0], left_out_s=window.duration_s)


def _with_voice(window: Window, listener: Listener) -> Window:
    start = round(window.start_s * SAMPLE_RATE)
    spoken = listener.spoken(start, start + len(window.samples))
    voice = ((first - start, last - start) for first, last in spoken)
    return dataclasses.replace(window, voice=tuple(_seconds(voice)))


def _seconds(stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[float, float]]:
    return ((start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in stretches)


def _emptied(held: deque[Samples]) -> Iterator[Samples]:
    """Yield each, given away for good: all is a megabyte of a request that takes minutes."""
    while held:
        yield held.popleft()


def pack(blocks: Iterable[Samples], listener: Listener) -> Iterator[Window | None]:
    """Cut the speech in audio into windows of at most 30 s, as soon as each is known.

    Stretches of speech follow each other in a window unless `APART_S` lie between them, and are cut
    as by `cut`, where they are quietest. Each window tells which pauses were left out, so that its
    times can be found again.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        listener: tells what is speech.

    Yields:
        Windows, and None where a minute of audio has given none. Without any speech it is one
        window that holds no samples.
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
    """Cuts speech, and knows where it came from; counts samples."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._cutter = Cutter()
        self._came = self._gone = 0  # speech that came, and that went into windows
        self._until = 0  # in the whole audio, where the speech that came ends
        # What was left out and is not yet in a window: where in the speech, and how much.
        self._pauses: deque[tuple[int, int]] = deque()
        self._out = 0  # left out before what is not yet in a window

    def push(self, start: int, samples: Samples) -> Iterator[Window]:
        """Take the next speech, which begins there in the whole audio."""
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

    def finish(self) -> Iterator[Window]:
        """Cut what is left, at the audio's end."""
        for window in self._cutter.finish():
            yield self._placed(window, self._listener.received - self._until if window.last else 0)

    def _placed(self, window: Window, after: int) -> Window:
        """Place a window of speech in the whole audio; `after` samples follow it there."""
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
        return Window(
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
        """Yield the stretches of a window in which somebody speaks, in samples of the window.

        Args:
            start: of the window in the whole audio.
            begin: of the window in the speech; it ends with what has gone into windows.
            inside: the pauses in it, where in the speech, and how long.
        """
        at = 0
        for place, length in (*inside, (self._gone, 0)):
            end = start + place - begin - at
            for first, last in self._listener.spoken(start, end):
                yield first - start + at, last - start + at
            start, at = end + length, place - begin
