"""Headers of every HTTP response, hosts and pages that may ask, and the log of what failed.

The owner of a name can let it point to 127.0.0.1 (DNS rebinding), and then browsers take a page
that came from it for this server's own: what such a page asks has that name as its Host.
"""

import http
import ipaddress
import logging
import re
import urllib.parse
from collections.abc import Callable, Iterable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.contract.errors import OverloadedError, RequestError, shown
from serve.contract.server_config import ServerConfig
from serve.gateway.edge.connection import SlowClientError
from serve.gateway.edge.listen import CROWDED
from serve.gateway.errors import ApiError, as_openai
from serve.gateway.observe.log import LogRecord

logger = logging.getLogger("earshot.gateway")

RECORD = "line"
"""Key of a request's line of the log, which has its name, in its scope's state."""

_SECURITY = {  # where a response does not say it otherwise
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_TLS = {"strict-transport-security": "max-age=31536000"}
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_REFUSED = 400
_HEALTH = ("/health", "/ready", "/live")  # whose answers are asked for again and again
_SERVED_BY = "x-earshot-model"
_WARNING = "x-earshot-warning"
_IGNORED = "x-earshot-ignored"
_MAX_HEADER = 1000  # characters of a header that repeats names or sentences
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+))(?::[0-9]*)?")  # [IPv6] or name, port
_LEFT = tuple(  # see `serve.gateway.keys.Caller.left`
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "audio-seconds")
    for what in ("limit", "remaining", "reset")
)
_READABLE = (  # by pages of allowed origins
    "x-request-id",
    "retry-after",
    _SERVED_BY,
    _WARNING,
    _IGNORED,
    "traceresponse",
    *_LEFT,
)


def served_by(model: str) -> dict[str, str]:
    """Name, in a header, the model which answers, whatever name it was asked by."""
    return {_SERVED_BY: urllib.parse.quote(model, safe="/:@ ")}


def warnings(texts: Sequence[str]) -> dict[str, str]:
    """Make a header of an answer's warnings; none where there are none."""
    text = urllib.parse.quote("; ".join(texts), safe=" :;,.()")
    return {_WARNING: text[:_MAX_HEADER]} if text else {}


def ignored(names: Iterable[str]) -> dict[str, str]:
    """Name, in a header, a form's fields without effect, where there are any."""
    text = ", ".join(urllib.parse.quote(name, safe="[]") for name in names)
    return {_IGNORED: text[:_MAX_HEADER]} if text else {}


def with_headers(
    app: ASGIApp, server: ServerConfig, leaving: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Wrap an application: responses name their requests as the log does.

    Browsers' requests from pages of other hosts are refused, unless these are allowed; so is what
    is for a host that this server is not, and what comes while too many connections are open.

    Args:
        app: answers them.
        server: says who is allowed.
        leaving: whether the server drains: then each response is the last of its connection, so
            that its client's next try reaches another server where there are several.
    """
    safe = dict(_SECURITY, **(_TLS if server.tls_certificate else {}))
    guarded = _guarded(app, server)

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope.get("path", "")
        line = scope.setdefault("state", {})[RECORD] = LogRecord(header=headers.get, path=path)
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", http.HTTPStatus.SWITCHING_PROTOCOLS)
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["x-request-id"] = line.id
                headers.update(line.left())
                headers.update(line.spans.answer_headers())
                if message["type"] != "websocket.accept":
                    if leaving():
                        headers["connection"] = "close"
                    for key, value in safe.items():
                        headers.setdefault(key, value)
            elif message["type"] == "websocket.close":
                status = status or http.HTTPStatus.FORBIDDEN  # which its client gets
            await send(message)

        try:
            await guarded(scope, receive, send_named)
        except SlowClientError:
            pass
        except Exception:  # it has been answered, or the connection is closed
            logger.exception("request %s failed in the gateway", line.id)
        finally:
            line.http_status = status
            _write(line)

    return named


def _write(line: LogRecord) -> None:
    """Write a request's line: of those for a transcript, and of any other that was refused."""
    if not line.route:
        if line.http_status < _REFUSED or line.path.endswith(_HEALTH):
            return
        line.route = line.path[:60]
        line.outcome = http.HTTPStatus(line.http_status).phrase.lower()
    line.write()


def _guarded(app: ASGIApp, server: ServerConfig) -> ASGIApp:
    """Refuse what may not ask; pages of other hosts that may are told so as CORS wants it."""
    shared = CORSMiddleware(
        app,
        allow_origins=server.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type", "traceparent", "tracestate"),
        expose_headers=_READABLE,
    )

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        refusal = _refusal(server, host, origin, crowded=scope.get(CROWDED, False))
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)
        elif origin is None or origin in server.allowed_origins:
            await shared(scope, receive, send)
        else:
            await app(scope, receive, send)  # a page of this server's own

    return checked


def _refusal(
    server: ServerConfig, host: str | None, origin: str | None, crowded: bool
) -> ApiError | None:
    if crowded:
        return ApiError(OverloadedError("too many connections are open; try again"), "connections")
    if not may_be_called(server, host or ""):
        error = RequestError(
            f"the request is for the host {shown(host or '')}; expected localhost, an address of "
            "loopback or one of server.allowed_hosts"
        )
        return ApiError(error, "host")
    if not (origin is None or origin in server.allowed_origins or _is_of(origin, host)):
        error = RequestError(
            f"pages of {shown(origin)} may not ask; server.allowed_origins says which may"
        )
        return ApiError(error, "origin")
    return None


def may_be_called(server: ServerConfig, host: str) -> bool:
    """Tell whether a request with this Host header is for this server.

    On loopback, and wherever `allowed_hosts` names some: names and addresses of loopback, with any
    port, and what it names. Elsewhere: every host.
    """
    if not server.on_loopback and not server.allowed_hosts:
        return True
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = (parts[1] or parts[2]).lower()
    return _is_of_loopback(name) or name in [known.lower() for known in server.allowed_hosts]


def _is_of_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_of(origin: str, host: str | None) -> bool:
    try:
        return urllib.parse.urlsplit(origin).netloc == host
    except ValueError:  # brackets that hold no address
        return False


async def _refuse(refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":  # whose server answers with a status of its own, 403
        await receive()
        await send({"type": "websocket.close", "code": refusal.status.close})
    else:
        hang_up = {"Connection": "close"} if refusal.reason == "connections" else {}
        await as_openai(refusal, headers=hang_up)(scope, receive, send)
