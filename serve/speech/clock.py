"""Fill gaps between a file's timestamps with silence.

Audio may start after the video, recorders pause, and packets get lost. Silence fills the gaps, so
that a transcript has the file's times. Time 0 is the beginning of the file, whatever its first
timestamp is.
"""

import dataclasses

_SUDDEN_S = 0.25  # minimum gap between two frames; the jitter of timestamps is smaller
_SLOW_S = 0.5  # minimum sum of smaller gaps (drift)
_BACK_S = 1.0  # a clock that goes back by more belongs to another recording
_MAX_GAP_S = 1800.0  # a longer gap also means another recording


@dataclasses.dataclass
class FileClock:
    """A counter that returns the silence to insert before each frame of a file's audio.

    Args:
        start_s: timestamp of the file's beginning; None: that of the first frame.
        max_s: maximum seconds of audio and silence together.
    """

    start_s: float | None
    max_s: float
    begins_s: float = 0.0  # silence before the first frame
    skipped_s: float = 0.0  # sum of gaps that are too long to be filled
    _at_s: float = 0.0  # audio and silence so far
    _end_s: float | None = None  # timestamp of the last frame's end
    _gaps: int = 0
    _filled_s: float = 0.0  # sum of the filled gaps
    _first_gap_s: float = 0.0
    _jumps: list[str] = dataclasses.field(default_factory=list)

    def silence_before(self, time_s: float | None, duration_s: float) -> float:
        """Return the seconds of silence to insert before the next frame.

        Args:
            time_s: the frame's timestamp; None: unknown.
            duration_s: the frame's duration.
        """
        gap_s = 0.0 if time_s is None else self._gap_s(time_s)
        self._at_s += gap_s + duration_s
        if time_s is not None:
            self._end_s = time_s + duration_s
        elif self._end_s is not None:
            self._end_s += duration_s
        return gap_s

    def warnings(self) -> list[str]:
        """Return warnings about gaps."""
        texts = []
        if self.begins_s:
            texts.append(
                f"the audio starts {self.begins_s:.2f} s after the file; times count from the "
                "beginning of the file"
            )
        if self._gaps:
            texts.append(
                f"the file's timestamps have {self._gaps} gap{'s' * (self._gaps != 1)} without "
                f"audio, {self._filled_s:.2f} s in total, the first at {self._first_gap_s:.2f} s; "
                "silence fills them to keep the times correct"
            )
        if self._jumps:
            more = f" (and {len(self._jumps) - 1} times more)" if len(self._jumps) > 1 else ""
            texts.append(
                f"the file's timestamps jump ahead by {self._jumps[0]}{more}, too far to fill with "
                "silence; times continue as if there were no gap"
            )
        return texts

    def _gap_s(self, time_s: float) -> float:
        first = self._end_s is None
        if self.start_s is None:
            self.start_s = time_s
        ahead_s = time_s - self.start_s - self._at_s
        sudden_s = ahead_s if self._end_s is None else time_s - self._end_s
        if ahead_s < -_BACK_S:  # another recording follows, with its own timestamps
            self.start_s += ahead_s
            return 0.0
        if not (ahead_s >= _SLOW_S or min(ahead_s, sudden_s) >= _SUDDEN_S):
            return 0.0
        if ahead_s > _MAX_GAP_S or self._at_s + ahead_s > self.max_s:
            self.start_s += ahead_s
            self.skipped_s += ahead_s
            self._jumps.append(f"{ahead_s:.1f} s at {self._at_s:.2f} s")
            return 0.0
        if first:
            self.begins_s = ahead_s
        else:
            self._first_gap_s = self._first_gap_s if self._gaps else self._at_s
            self._gaps += 1
            self._filled_s += ahead_s
        return ahead_s
