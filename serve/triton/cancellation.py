"""Cancel requests by their keys.

Calls to Triton are never cancelled: Triton 24.10 leaks a call if its cancellation races with the
call's end. The gateway therefore gives each request a key, in the request's parameter
`earshot_key`. When the client has gone, it sends the key in the parameter `earshot_cancel` of
another request. The request then ends with a CancelledError. The two requests may arrive in any
order.

A key is the number of a gateway process, the name of the sender and a number, joined by dashes.
Each process has one sender at a time. If a process was replaced, the first cancel from the new
one ends the remaining requests of the replaced process.
"""

import functools
from collections.abc import Callable

from serve.contract.errors import CancelledError
from serve.contract.messages import (
    OnEvent,
    RequestFailed,
    RequestFinished,
    RequestHandle,
    TranscriberEvent,
)

MAX_CANCELLED_KEYS = 1024
"""Maximum number of remembered keys that were cancelled before their requests arrived."""

Submit = Callable[[OnEvent], RequestHandle]


def owner_of(key: str) -> str:
    """Return the sender's name in a key."""
    return key.rpartition("-")[0]


def _is_abandoned(key: str, cancel_key: str) -> bool:
    """Return whether a key's sender was replaced by the sender of `cancel_key`."""
    same_process = key.partition("-")[0] == cancel_key.partition("-")[0]
    return same_process and owner_of(key) != owner_of(cancel_key)


class CancellationRegistry:
    """The running requests by key, and the keys that were cancelled before their requests arrived.

    One thread submits and cancels, that of Triton's `execute`. Events may come from another.
    """

    def __init__(self) -> None:
        # Each list gets the request's handle once it is submitted.
        self._running: dict[str, list[RequestHandle]] = {}
        self._cancelled: dict[str, None] = {}  # the latest ones, in order of arrival

    def submit(self, key: str, on_event: OnEvent, submit: Submit) -> RequestHandle:
        """Submit a request under its key.

        Args:
            key: a key that is used once.
            on_event: receives the request's events.
            submit: submits the request with a receiver of events; may raise.

        Raises:
            CancelledError: the key was cancelled, or another request runs under it.
        """
        if key in self._cancelled:
            raise CancelledError("the client cancelled the request before it arrived")
        if key in self._running:
            raise CancelledError("another request runs under this key; use each key once")
        handles = self._running[key] = list[RequestHandle]()
        try:
            handles.append(submit(functools.partial(self._forward, key, on_event)))
        except BaseException:
            self._running.pop(key, None)
            raise
        return handles[0]

    def cancel(self, key: str) -> None:
        """End the request of this key, now or when it arrives.

        Also end the requests of a process that the key's sender has replaced.
        """
        if key not in self._running:
            self._cancelled.pop(key, None)
            self._cancelled[key] = None
            if len(self._cancelled) > MAX_CANCELLED_KEYS:
                del self._cancelled[next(iter(self._cancelled))]
        for running in list(self._running):
            if running == key or _is_abandoned(running, key):
                for handle in self._running.get(running, ()):
                    handle.cancel()

    def _forward(self, key: str, on_event: OnEvent, event: TranscriberEvent) -> None:
        if isinstance(event, RequestFinished | RequestFailed):
            self._running.pop(key, None)
        on_event(event)
