"""The log: what would be said again and again is said a few times a minute.

Whatever a client can make the gateway say, it can make it say a million times.
"""

import dataclasses
import logging
import time
from collections.abc import Callable

MOST = 30
"""Lines a minute, of each place in the source that speaks."""
_MINUTE_S = 60.0


@dataclasses.dataclass
class _Place:
    since_s: float
    lines: int = 0
    left_out: int = 0


class FewLines(logging.Filter):
    """Lets a few lines through of each place in the source, in each minute.

    The first of the next minute tells how many were left out.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now_s = self._clock()
        place = self._places.setdefault((record.pathname, record.lineno), _Place(now_s))
        if now_s - place.since_s >= _MINUTE_S:
            if place.left_out:
                record.msg = f"{record.getMessage()} (and {place.left_out} more before)"
                record.args = ()
            place.since_s, place.lines, place.left_out = now_s, 0, 0
        place.lines += 1
        place.left_out += place.lines > MOST
        return place.lines <= MOST
