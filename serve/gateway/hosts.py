"""By which names a gateway on loopback may be called.

The owner of a name can let it point to 127.0.0.1 (DNS rebinding), and then browsers take a page
that came from it for this server's own: what such a page asks has that name as its Host.
"""

import ipaddress
import re

from starlette.responses import JSONResponse

from serve.contract.config import ServerConfig
from serve.contract.errors import shown

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+))(?::[0-9]*)?")  # [IPv6] or name, port


def may_be_called(server: ServerConfig, host: str) -> bool:
    """Whether a request with this Host header is for this server.

    On loopback, and wherever `allowed_hosts` names some: names and addresses of loopback, with any
    port, and what it names. Elsewhere: every host.
    """
    if not server.on_loopback and not server.allowed_hosts:
        return True
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = (found[1] or found[2]).lower()
    return _is_of_loopback(name) or name in [known.lower() for known in server.allowed_hosts]


def _is_of_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def refusal(host: str) -> JSONResponse:
    """What a request gets that is for another host."""
    error = {
        "message": f"the request is for the host {shown(host)}; expected localhost, an address of "
        "loopback or one of server.allowed_hosts",
        "type": "invalid_request_error",
        "param": None,
        "code": "host_not_allowed",
    }
    return JSONResponse({"error": error}, 421)
