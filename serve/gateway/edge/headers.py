"""Headers of HTTP: the checks of Host and Origin, each response's headers, and the log record.

The owner of a domain can let it point to 127.0.0.1 (DNS rebinding). Browsers then take a page of
that domain for this server's own; the page's requests have the domain as their Host.
"""

import http
import ipaddress
import logging
import re
import urllib.parse
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.contract.errors import OverloadedError, RequestError, shown
from serve.contract.server_config import ServerConfig
from serve.gateway.edge.connection import SlowClientError
from serve.gateway.edge.listen import TOO_MANY_CONNECTIONS
from serve.gateway.errors import ApiError, as_openai
from serve.gateway.limits import Admission
from serve.gateway.observe.log import LogRecord

logger = logging.getLogger("earshot.gateway")

RECORD = "record"
"""Key of a request's log record in the scope's state."""

_SECURITY = {  # unless a response has another value
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_TLS = {"strict-transport-security": "max-age=31536000"}
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_HEALTH = ("/health", "/ready", "/live")  # polled again and again, so not in the log
_MAX_HEADER = 1000  # characters of a header that repeats a client's names
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+))(?::[0-9]*)?")  # [IPv6] or name, port


def served_by(model: str) -> dict[str, str]:
    """Return the header that names the model which answers."""
    return {"x-earshot-model": urllib.parse.quote(model, safe="/:@ ")}


def warnings(texts: Sequence[str]) -> dict[str, str]:
    """Return the header of an answer's warnings, if there are any."""
    text = urllib.parse.quote("; ".join(texts), safe=" :;,.()")
    return {"x-earshot-warning": text[:_MAX_HEADER]} if text else {}


def ignored(names: Iterable[str]) -> dict[str, str]:
    """Return the header that names the ignored fields of a form, if there are any."""
    text = ", ".join(urllib.parse.quote(name, safe="[]") for name in names)
    return {"x-earshot-ignored": text[:_MAX_HEADER]} if text else {}


def with_headers(app: ASGIApp, server: ServerConfig, admission: Admission) -> ASGIApp:
    """Wrap an application: check hosts and origins, add headers, and log rejected requests.

    Requests of browsers from pages of other hosts are rejected, unless these are allowed; so are
    requests for another host, and all requests while too many connections are open.

    Args:
        app: the application.
        server: names the hosts and origins that are allowed.
        admission: tells whether the server drains. Then each response is the connection's
            last: the client's next try reaches another server if there are several.
    """
    safe = dict(_SECURITY, **(_TLS if server.tls_certificate else {}))
    checked = CORSMiddleware(
        app,
        allow_origins=server.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type", "traceparent", "tracestate"),
        expose_headers=("*",),
    )

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope.get("path", "")
        record = scope.setdefault("state", {})[RECORD] = LogRecord(header=headers.get, path=path)
        rejection = _rejection(server, headers, scope.get(TOO_MANY_CONNECTIONS, False))

        async def send_named(message: Message) -> None:
            if message["type"] in _STARTS:
                record.http_status = message.get("status", http.HTTPStatus.SWITCHING_PROTOCOLS)
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["x-request-id"] = record.id
                headers.update(record.limit_headers())
                if message["type"] != "websocket.accept":
                    if admission.draining:
                        headers["connection"] = "close"
                    for key, value in safe.items():
                        headers.setdefault(key, value)
            elif message["type"] == "websocket.close":  # before accept, its client gets 403
                record.http_status = record.http_status or http.HTTPStatus.FORBIDDEN
            await send(message)

        try:
            await (rejection or checked)(scope, receive, send_named)
        except SlowClientError:
            pass
        except Exception:  # it has been answered, or the connection is closed
            logger.exception("request %s failed in the gateway", record.id)
        finally:
            _write_rejected(record)

    return named


def _write_rejected(record: LogRecord) -> None:
    """Write the record of a rejected request that was not known to be for a transcript."""
    unwritten = not record.route  # else its `RequestContext` has written the record
    if unwritten and record.http_status >= 400 and not record.path.endswith(_HEALTH):
        record.route = record.path[:60]
        record.outcome = http.HTTPStatus(record.http_status).phrase.lower()
        record.write()


def _rejection(server: ServerConfig, headers: Headers, too_many: bool) -> Response | None:
    """Return the answer to a request that is not allowed, or if too many connections are open."""
    if too_many:
        full = OverloadedError("too many connections are open; try again")
        return as_openai(ApiError(full, "connections"), {"Connection": "close"})
    host, origin = headers.get("host", ""), headers.get("origin")
    if not may_be_called(server, host):
        text = f"Host is {shown(host)}; expected a name of loopback or one of server.allowed_hosts"
        return as_openai(ApiError(RequestError(text), "host"))
    same_origin = origin is None or origin.partition("://")[2] == host
    if not (same_origin or origin in server.allowed_origins):
        text = f"Origin is {shown(origin)}; expected this server or one of server.allowed_origins"
        return as_openai(ApiError(RequestError(text), "origin"))
    return None


def may_be_called(server: ServerConfig, host: str) -> bool:
    """Return whether a request with this Host header is for this server.

    On loopback, or if `allowed_hosts` names hosts: names and addresses of loopback, with any port,
    and these hosts. Else: every host.
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
