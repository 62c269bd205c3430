"""When an utterance that goes on is decoded again."""

import math


class Pace:
    """The pace of one stream's decodings.

    One follows the other after `update_s`, but rests as long as it took: a server that has many
    streams then answers each of them sooner than if every one waited in its queue all the time.

    Args:
        update_s: least time between the beginnings of two decodings.
    """

    def __init__(self, update_s: float) -> None:
        self._update_s = update_s
        self._began_s = self._due_s = -math.inf

    @property
    def due_s(self) -> float:
        """When the next may begin."""
        return self._due_s

    def speech(self, now_s: float) -> None:
        """Speech begins: there is nothing to decode before a while of it."""
        self._due_s = max(self._due_s, now_s + self._update_s)

    def began(self, now_s: float) -> None:
        """A decoding begins."""
        self._began_s = now_s

    def ended(self, now_s: float) -> None:
        """It has ended."""
        self._due_s = max(self._began_s + self._update_s, 2 * now_s - self._began_s)

    def failed(self, now_s: float, tries: int) -> None:
        """It was the server's fault, so many times in a row."""
        self._due_s = now_s + self._update_s * tries
