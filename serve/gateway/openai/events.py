"""Server-sent events: an answer that is sent piece by piece.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from typing import Any

from starlette.types import Send

from serve.contract.codec import to_json
from serve.gateway.protocols import NotTaken
from serve.gateway.refusals import client_gone

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would hold it back until it is whole
]


class Events:
    """One response of events; begins with the first.

    `headers` may get more before that.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: dict[str, str] = {}
        self.begun = False

    async def send(self, event: dict[str, Any]) -> None:
        """Send an event.

        Raises:
            Refusal: the client does not take it.
        """
        if not self.begun:
            self.begun = True
            headers = [(name.encode(), text.encode()) for name, text in self.headers.items()]
            start = {"type": "http.response.start", "status": 200, "headers": _HEADERS + headers}
            await self._pass(start)
        data = f"data: {to_json(event)}\n\n".encode()
        await self._pass({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """There are no more."""
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except NotTaken:
            raise client_gone() from None
