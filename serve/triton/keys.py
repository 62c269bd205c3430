"""Requests by the keys that their senders gave them, so that a key is enough to cancel one.

Triton 24.10 keeps a call for ever whose cancel met its end, so calls are never cancelled there.
The gateway gives each request a key, as the request's parameter `earshot_key`, and sends the same
key as the parameter `earshot_cancel` of a request of its own when nobody waits for the answer any
more. The request then ends with a CancelledError as with any other. Which of the two arrives first
does not matter.

A key is the number of a gateway's process, its sender's own name and a number, with dashes
between them. Of each process there is one sender at a time: whatever one leaves behind that is
gone, ends with the first cancel of the next.
"""

import functools
import threading
from collections.abc import Callable

from serve.contract.errors import CancelledError
from serve.contract.messages import Failed, Finished, OnEvent, RequestHandle, TranscriberEvent

MAX_KEY_CHARS = 64
REMEMBERED = 1024
"""So many keys that were cancelled before their requests came."""

Submit = Callable[[OnEvent], RequestHandle]


def owner_of(key: str) -> str:
    """Return the name of a key's sender."""
    return key.rpartition("-")[0]


def _is_left(key: str, by: str) -> bool:
    """Tell whether a key's sender was the same process as another's, before a restart."""
    return key.partition("-")[0] == by.partition("-")[0] and owner_of(key) != owner_of(by)


class Keys:
    """The requests that run under a key, and the keys that no request may come under any more.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, RequestHandle | None] = {}  # None until it is submitted
        self._cancelled: dict[str, None] = {}  # the latest, in order of their coming

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
            if key in self._cancelled:
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
            cancelled = key in self._cancelled
            if key in self._running:  # else it has ended already
                self._running[key] = handle
        if cancelled:  # meanwhile
            handle.cancel()
        return handle

    def cancel(self, key: str) -> None:
        """End the request of this key, or refuse it when it comes, and what its process left."""
        with self._lock:
            left = [running for running in self._running if _is_left(running, key)]
            handles = {ended: self._running.get(ended) for ended in (key, *left)}
            for ended, handle in handles.items():
                if handle is None:
                    self._remember(ended)
        for handle in handles.values():
            if handle is not None:
                handle.cancel()

    def _remember(self, key: str) -> None:
        self._cancelled.pop(key, None)
        self._cancelled[key] = None
        if len(self._cancelled) > REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    def _pass_on(self, key: str, on_event: OnEvent, event: TranscriberEvent) -> None:
        if isinstance(event, Finished | Failed):
            self._forget(key)
        on_event(event)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._running.pop(key, None)
