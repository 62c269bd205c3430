"""The times at which a stream's samples came."""

import bisect
import collections
import math

from serve.speech.activity import FRAME

_ARRIVALS = 4096  # that are remembered, at least a frame apart


class Arrivals:
    """The times at which samples of the last minutes came: a client may send one by one.

    Args:
        now_s: the time at which the stream begins.
    """

    def __init__(self, now_s: float) -> None:
        self.samples = 0
        self._known = collections.deque([(0, now_s)], maxlen=_ARRIVALS)

    def note(self, samples: int, at_s: float) -> None:
        """Note how many have come by now; less than a frame comes with those after it."""
        self.samples = samples
        if len(self._known) > 1 and samples - self._known[-2][0] < FRAME:
            self._known.pop()
        self._known.append((samples, at_s))

    def at(self, sample: int) -> float:
        """Find when a sample had come."""
        index = bisect.bisect_left(self._known, (sample, -math.inf))
        return self._known[min(index, len(self._known) - 1)][1]
