"""How many live streams there are, and how they are told to end."""

import contextlib
from collections.abc import Callable, Iterator

from serve.config import LiveConfig
from serve.gateway import refusals


class Streams:
    """The live streams of a gateway. For one event loop."""

    def __init__(self, config: LiveConfig) -> None:
        self._most = config.max_streams
        self._ends: set[Callable[[], None]] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._ends)

    @contextlib.contextmanager
    def one_more(self, end: Callable[[], None]) -> Iterator[None]:
        """A stream, for the length of a `with` block; `end` is called when it is to end itself.

        Raises:
            Refusal: there are as many as may be.
        """
        if len(self) >= self._most:
            raise refusals.overloaded(
                f"{len(self)} live streams are open, as many as may be (live.max_streams); try "
                "again later",
                "streams",
            )
        self._ends.add(end)
        try:
            yield
        finally:
            self._ends.remove(end)

    def end_all(self) -> None:
        """Ask every one to end itself."""
        for end in list(self._ends):
            end()
