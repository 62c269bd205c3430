"""What every HTTP response carries, and the log of requests that failed."""

import logging
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("earshot.gateway")

REQUEST_ID = "request_id"
"""Key of a request's name in its scope's state."""


def with_headers(app: ASGIApp) -> ASGIApp:
    """An application whose responses name their requests, as what the log says of them does."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        name = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})[REQUEST_ID] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await app(scope, receive, send_named)
        except Exception:  # it has been answered, or the connection is closed
            logger.exception("request %s failed in the gateway", name)

    return named
