"""Times in windows from which pauses were cut out, and the same times in the whole audio.

Pure functions. Between two stretches of speech that now touch lies a seam; on either side of it is
a margin of audio in which nobody speaks. A segment that begins in the margin before a seam begins
after the pause, and one that ends in the margin after it ends before the pause. A word that lies
across a seam belongs to the side on which its middle is.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from serve.contract.messages import Segment, Word


@dataclasses.dataclass(frozen=True)
class Pause:
    """A part that was cut out of a window; all in seconds."""

    at_s: float  # from the window's start
    length_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The place of a window's audio in the whole.

    Both mappings never run backwards, and no time before another becomes a start behind its end.
    """

    start_s: float  # the window's, in the whole audio
    pauses: Sequence[Pause] = ()  # in order
    margin_s: float = 0.0  # without speech, on either side of each pause

    def start(self, time_s: float) -> float:
        """Return the start in the whole audio of what begins at `time_s` of the window."""
        out = 0.0
        for pause in self.pauses:
            if time_s < pause.at_s - self.margin_s:
                break
            time_s = max(time_s, pause.at_s)
            out += pause.length_s
        return self.start_s + time_s + out

    def end(self, time_s: float) -> float:
        """Return the end in the whole audio of what ends at `time_s` of the window."""
        out = 0.0
        for pause in self.pauses:
            if time_s <= pause.at_s + self.margin_s:
                time_s = min(time_s, pause.at_s)
                break
            out += pause.length_s
        return self.start_s + time_s + out

    def word(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Return start and end in the whole audio of a word at these times of the window."""
        middle, out = (start_s + end_s) / 2, 0.0
        for pause in self.pauses:
            if middle < pause.at_s:
                end_s = min(end_s, pause.at_s)
                break
            start_s = max(start_s, pause.at_s)
            end_s = max(end_s, start_s)
            out += pause.length_s
        return self.start_s + start_s + out, self.start_s + end_s + out

    def restore(self, segments: Iterable[Segment]) -> list[Segment]:
        """Return segments with their times, and their words', in the whole audio.

        Args:
            segments: of the window, in order; times as if nothing had been cut out of it.
        """
        segments = list(segments)
        return [self._restored(segment) for segment in segments] if self.pauses else segments

    def _restored(self, segment: Segment) -> Segment:
        words = None if segment.words is None else tuple(map(self._restored_word, segment.words))
        start = self.start(segment.start - self.start_s)
        end = self.end(segment.end - self.start_s)
        if segment.words and words:
            if segment.start == segment.words[0].start:
                start = words[0].start
            if segment.end == segment.words[-1].end:
                end = words[-1].end
        start, end = round(start, 3), round(max(start, end), 3)
        return dataclasses.replace(segment, start=start, end=end, words=words)

    def _restored_word(self, word: Word) -> Word:
        start, end = self.word(word.start - self.start_s, word.end - self.start_s)
        return dataclasses.replace(word, start=round(start, 3), end=round(end, 3))
