"""Requests by the keys that their senders gave them, so that a key is enough to cancel one.

Triton 24.10 keeps a call for ever whose cancel met its end, so calls are never cancelled there.
Whoever sends a request to Triton gives it a key, as the request's parameter `earshot_key`, and
sends the same key to the relay when nobody waits for the answer any more. The request then ends
with a CancelledError as with any other. Which of the two arrives first does not matter.

A key is its sender's own name, a dash and a number. A sender that is gone has all its requests
cancelled, also those that are still on their way.
"""

import functools
import threading
from collections.abc import Callable

from serve.errors import CancelledError
from serve.messages import Failed, Finished, OnEvent, RequestHandle, TranscriberEvent

REMEMBERED = 1024
"""So many keys that were cancelled before their requests came, and so many senders gone."""

Submit = Callable[[OnEvent], RequestHandle]


def owner_of(key: str) -> str:
    """The name of a key's sender."""
    return key.rpartition("-")[0]


class Keys:
    """The requests that run under a key, and the keys that no request may come under any more.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, RequestHandle | None] = {}  # None until it is submitted
        self._cancelled = _Latest(REMEMBERED)
        self._gone = _Latest(REMEMBERED)  # names of senders

    def submit(self, key: str, on_event: OnEvent, submit: Submit) -> RequestHandle:
        """Submit a request under its key.

        Args:
            key: used once.
            on_event: gets the request's events.
            submit: called with what is to get them in its place; may raise.

        Raises:
            CancelledError: the key was cancelled, or another request runs under it.
        """
        with self._lock:
            if key in self._cancelled or owner_of(key) in self._gone:
                raise CancelledError("the client cancelled the request before it arrived")
            if key in self._running:
                raise CancelledError("another request runs under this key; use each key once")
            self._running[key] = None
        try:
            handle = submit(functools.partial(self._pass_on, key, on_event))
        except BaseException:
            self._forget(key)
            raise
        with self._lock:
            cancelled = key in self._cancelled or owner_of(key) in self._gone
            if key in self._running:  # else it has ended already
                self._running[key] = handle
        if cancelled:  # meanwhile
            handle.cancel()
        return handle

    def cancel(self, key: str) -> None:
        """End the request of this key, or refuse it when it comes."""
        with self._lock:
            handle = self._running.get(key)
            if handle is None:
                self._cancelled.add(key)
        if handle is not None:
            handle.cancel()

    def cancel_owner(self, owner: str) -> None:
        """End every request whose key has this sender, and refuse what comes from it."""
        with self._lock:
            self._gone.add(owner)
            keys = [key for key in self._running if owner_of(key) == owner]
            handles = [self._running[key] for key in keys]
        for handle in handles:
            if handle is not None:
                handle.cancel()

    def _pass_on(self, key: str, on_event: OnEvent, event: TranscriberEvent) -> None:
        if isinstance(event, Finished | Failed):
            self._forget(key)
        on_event(event)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._running.pop(key, None)


class _Latest:
    """The last few of the names that were added."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._names: dict[str, None] = {}  # in order of their coming

    def add(self, name: str) -> None:
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > self._size:
            del self._names[next(iter(self._names))]

    def __contains__(self, name: str) -> bool:
        return name in self._names
