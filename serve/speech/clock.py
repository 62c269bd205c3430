"""The clock of a file: where in its timeline each decoded frame belongs.

Sound may begin after the picture, recorders pause, packets are lost. Silence stands where the clock
of a file has no sound, so that the times of a transcript are the file's. Time 0 is where the file
begins, whatever its clock says then.
"""

import dataclasses

_SUDDEN_S = 0.25  # a gap between two frames; packet times may jitter by less
_SLOW_S = 0.5  # the sum of gaps that are too small to be seen alone
_BACK_S = 1.0  # by which a clock goes back only where another recording follows
_MAX_GAP_S = 1800.0  # a longer one is where another recording follows


@dataclasses.dataclass
class FileClock:
    """Says how much silence belongs before each frame of a file's sound.

    Args:
        start_s: time at which the file begins, by its clock; None: with its first frame.
        max_s: the most seconds that sound and silence may last together.
    """

    start_s: float | None
    max_s: float
    begins_s: float = 0.0  # silence before the first frame
    skipped_s: float = 0.0  # gaps that are too long to be filled
    _at_s: float = 0.0  # sound and silence so far
    _end_s: float | None = None  # of the latest frame, by the file's clock
    _gaps: int = 0
    _filled_s: float = 0.0  # in all of them
    _first_gap_s: float = 0.0
    _jumps: list[str] = dataclasses.field(default_factory=list)

    def silence_before(self, time_s: float | None, duration_s: float) -> float:
        """Return the seconds of silence that belong before the next frame.

        Args:
            time_s: when the frame begins, by the file's clock; None: unknown.
            duration_s: of the frame.
        """
        gap_s = 0.0 if time_s is None else self._gap_s(time_s)
        self._at_s += gap_s + duration_s
        if time_s is not None:
            self._end_s = time_s + duration_s
        elif self._end_s is not None:
            self._end_s += duration_s
        return gap_s

    def warnings(self) -> list[str]:
        """Tell what was filled or guessed."""
        texts = []
        if self.begins_s:
            texts.append(
                f"sound begins {self.begins_s:.2f} s after the file does; times count from the "
                "file's begin"
            )
        if self._gaps:
            texts.append(
                f"the file's clock has {self._gaps} gap{'s' * (self._gaps != 1)} without sound, "
                f"{self._filled_s:.2f} s in all, the first at {self._first_gap_s:.2f} s; silence "
                "fills them, so that times are right"
            )
        if self._jumps:
            more = f" (and {len(self._jumps) - 1} times more)" if len(self._jumps) > 1 else ""
            texts.append(
                f"the file's clock jumps ahead by {self._jumps[0]}{more}, more than silence may "
                "fill; times go on as if there were no gap"
            )
        return texts

    def _gap_s(self, time_s: float) -> float:
        first = self._end_s is None
        if self.start_s is None:
            self.start_s = time_s
        ahead_s = time_s - self.start_s - self._at_s
        sudden_s = ahead_s if self._end_s is None else time_s - self._end_s
        if ahead_s < -_BACK_S:  # another recording follows, and its clock begins anew
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
