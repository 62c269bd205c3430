"""How many live streams there are, and how they are told to end."""

import contextlib
from collections.abc import Callable, Iterator

from serve.contract.config import LiveConfig
from serve.gateway import refusals
from serve.gateway.limits import Account


class Streams:
    """The live streams of a gateway. For one event loop."""

    def __init__(self, config: LiveConfig) -> None:
        self._most = config.max_streams
        self._ends: set[Callable[[], None]] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._ends)

    @contextlib.contextmanager
    def one_more(self, account: Account, end: Callable[[], None]) -> Iterator[None]:
        """A stream of this key, for the length of a `with` block.

        Args:
            account: the key's.
            end: is called when the stream is to end itself.

        Raises:
            Refusal: there are as many as may be.
        """
        if account.streams >= account.max_streams:
            raise refusals.key_limit("live_streams", account.name)
        if len(self) >= self._most:
            raise refusals.overloaded(
                f"{len(self)} live streams are open, as many as may be (live.max_streams); try "
                "again later",
                "streams",
            )
        self._ends.add(end)
        account.streams += 1
        try:
            yield
        finally:
            self._ends.remove(end)
            account.streams -= 1

    def end_all(self) -> None:
        """Ask every one to end itself."""
        for end in list(self._ends):
            end()
