"""Map times in a window without pauses to times in the recording.

Pure functions. A cut-out pause leaves a seam, with a margin of silence on either side. A segment
that starts in the margin before a seam starts after the pause. A segment that ends in the margin
after it ends before the pause. A word across a seam belongs to the side that its middle is on.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from serve.contract.messages import Segment, Word


@dataclasses.dataclass(frozen=True)
class Pause:
    """A pause that was cut out of a window; all in seconds."""

    at_s: float  # from the window's start
    length_s: float


@dataclasses.dataclass(frozen=True)
class WindowTimeline:
    """The mapping of a window's times to the recording.

    `start` and `end` are non-decreasing, and a start is never mapped to a time after a later end.
    """

    start_s: float  # the window's start in the recording
    pauses: Sequence[Pause] = ()  # in order
    margin_s: float = 0.0  # silence on either side of each pause

    def start(self, time_s: float) -> float:
        """Map a start time of the window to the recording."""
        out = 0.0
        for pause in self.pauses:
            if time_s < pause.at_s - self.margin_s:
                break
            time_s = max(time_s, pause.at_s)
            out += pause.length_s
        return self.start_s + time_s + out

    def end(self, time_s: float) -> float:
        """Map an end time of the window to the recording."""
        out = 0.0
        for pause in self.pauses:
            if time_s <= pause.at_s + self.margin_s:
                time_s = min(time_s, pause.at_s)
                break
            out += pause.length_s
        return self.start_s + time_s + out

    def word(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Map the start and end of a word in the window to the recording."""
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
        """Map the times of segments and their words to the recording.

        Args:
            segments: the window's segments in order, with times that ignore the pauses.
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
