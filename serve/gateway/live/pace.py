"""The times at which an utterance that goes on is decoded again, and how much from before it."""

import math
from collections.abc import Mapping

from serve.gateway.live.settings import Delay

HOLD_S = 9.0, 24.0
"""Seconds of audio that are decoded again and again, at least and at most: a window has 30 s."""

DELAYS: Mapping[Delay | None, float] = {
    **{None: 1.0, "minimal": 1.0, "low": 1.0},
    **{"medium": 1.5, "high": 2.0, "xhigh": 3.0},
}
"""How many times the configured time passes between decodings, by a session's `delay`."""

_BUSY = 0.75  # of `update_s`; a decoding that takes longer gets less audio
_LESS, _MORE_S = 0.8, 1.0  # by decoding: what is too much is felt at once, what is not in seconds


class Pace:
    """The pace of one stream's decodings.

    One follows the other after `update_s`. Where there are several streams each rests besides, the
    longer the more there are, at most as long as it took: a server answers streams that take turns
    sooner than streams that wait in its queue all the time. One alone has nobody to rest for.

    Args:
        update_s: least time between the beginnings of two decodings.
    """

    def __init__(self, update_s: float) -> None:
        self._update_s = update_s
        self._began_s = self._due_s = -math.inf
        self.hold_s = HOLD_S[0]
        """Seconds of audio that the next decoding should not exceed, within `HOLD_S`."""

    @property
    def due_s(self) -> float:
        """The time when the next may begin."""
        return self._due_s

    def tune(self, update_s: float) -> None:
        """Set the least time between the beginnings of two decodings, from the next one on."""
        self._update_s = update_s

    def speech(self, now_s: float) -> None:
        """Note that speech begins: there is nothing to decode before a while of it."""
        self._due_s = max(self._due_s, now_s + self._update_s)

    def began(self, now_s: float) -> None:
        """Note that a decoding begins."""
        self._began_s = now_s

    def ended(self, now_s: float, streams: int) -> None:
        """Note that it has ended; so many streams are open, this one too."""
        took_s = now_s - self._began_s
        rest_s = took_s * (1 - 1 / streams)
        self._due_s = max(self._began_s + self._update_s, now_s + rest_s)
        if took_s > _BUSY * self._update_s:
            self.hold_s = max(HOLD_S[0], _LESS * self.hold_s)
        else:
            self.hold_s = min(HOLD_S[1], self.hold_s + _MORE_S)

    def failed(self, now_s: float, tries: int) -> None:
        """Note that it failed by the server's fault, so many times in a row."""
        self._due_s = now_s + self._update_s * tries
