"""Places outside that jobs may name: which urls, and which addresses these may lie at.

The owner of a name can let it point to any address, and to another one the next moment. So a name
is resolved here, every address that it has is checked, and the connection goes to one of these.
"""

import asyncio
import dataclasses
import ipaddress
import re
import socket
import urllib.parse
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import httpcore2

from serve.contract.errors import shown
from serve.contract.jobs_config import PLACE, JobsConfig
from serve.gateway.errors import field_error

_MAX_URL = 4096  # characters; urls that are signed are long
_PLAIN = re.compile(r"[!-~]+")
# What resolvers take: others end in errors that look as if a name could not be found just now.
_HOST = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?|[0-9a-f:.]+", re.ASCII)
_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPv4_BITS = 0xFFFF_FFFF

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class InsideError(Exception):
    """A name has an address inside the house."""


@dataclasses.dataclass(frozen=True)
class _Place:
    scheme: str
    host: str  # which may begin with *.
    port: int | None

    def holds(self, scheme: str, host: str, port: int | None) -> bool:
        """Tell whether a url's place is this."""
        named = host == self.host
        if self.host.startswith("*."):
            named = host.endswith(self.host[1:])
        return named and (scheme, port) == (self.scheme, self.port)


class Places:
    """The places that the configuration allows.

    Args:
        config: names them.
    """

    def __init__(self, config: JobsConfig) -> None:
        self._texts = config.allowed_hosts
        self._places = [_place(text) for text in config.allowed_hosts]
        self.networks = [ipaddress.ip_network(text) for text in config.allowed_networks]

    def require(self, url: str, field: str) -> None:
        """Refuse a url of another place.

        Args:
            url: as a client, or an answer's redirect, names it.
            field: of the client's that it came by.

        Raises:
            ApiError: nothing is fetched from there.
        """
        if not self._places:
            raise field_error(
                field,
                f"{field} names a place outside, and this server goes to none; "
                "jobs.allowed_hosts of its config may name some",
            )
        parts = _parts(url, field)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port
        port = _PORTS[parts.scheme] if port is None else port
        if not any(place.holds(parts.scheme, host, port) for place in self._places):
            raise field_error(
                field,
                f"{field} names {shown(f'{parts.scheme}://{parts.netloc}')}; expected one of "
                f"{', '.join(self._texts)} (jobs.allowed_hosts)",
            )


def _place(text: str) -> _Place:
    found = PLACE.fullmatch(text)
    assert found, text  # the configuration was read
    scheme = found[1] or "https"
    return _Place(scheme, found[2].lower(), int(found[3]) if found[3] else _PORTS[scheme])


def _parts(url: str, field: str) -> urllib.parse.SplitResult:
    if len(url) > _MAX_URL or not _PLAIN.fullmatch(url):
        raise field_error(
            field, f"{field} = {shown(url)}; expected at most {_MAX_URL} characters of ASCII"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise field_error(field, f"{field} = {shown(url)} is no url: {error}") from error
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or port == 0:
        raise field_error(
            field,
            f"{field} = {shown(url)}; expected https:// and a host's name, such as a signed url of "
            "an object store",
        )
    if parts.username is not None or parts.password is not None:
        raise field_error(field, f"{field} holds a user's name or password; leave them out")
    return parts


def is_inside(text: str) -> bool:
    """Tell whether an address is of this machine, its network, or of nobody."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        carried = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            carried.append(ipaddress.IPv4Address(int(address) & _IPv4_BITS))
        if any(_is_inside(inner) for inner in carried if inner is not None):
            return True
        if address.ipv4_mapped is not None:
            return False  # it is that
    return _is_inside(address)


def _is_inside(address: Address) -> bool:
    return not address.is_global or address.is_multicast or address.is_reserved


async def addresses_of(
    host: str, port: int, networks: Iterable[Any], threads: Executor
) -> list[str]:
    """Resolve a name; each of its addresses is outside, or in one of these networks.

    Args:
        host: the name.
        port: the port.
        networks: inside the house, where addresses may lie all the same.
        threads: wait for the name's servers.

    Raises:
        OSError: it has none.
        InsideError: one is inside.
    """
    loop, networks = asyncio.get_running_loop(), tuple(networks)
    found = await loop.run_in_executor(
        threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        plain = ipaddress.ip_address(address.partition("%")[0])
        if is_inside(address) and not any(plain in network for network in networks):
            raise InsideError(host)
    return addresses


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that were checked; for a pool of httpcore's.

    Args:
        networks: inside the house, where a host may lie all the same.
        threads: wait for names' servers.
    """

    def __init__(self, networks: Sequence[Any], threads: Executor) -> None:
        self._networks = networks
        self._threads = threads
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve, check, and connect to the first address that answers.

        Raises:
            InsideError: the host has an address inside the house.
            httpcore2.ConnectError: it has none, or none answers.
        """
        try:
            async with asyncio.timeout(timeout):
                addresses = await addresses_of(host, port, self._networks, self._threads)
        except OSError as error:  # TimeoutError is one
            raise httpcore2.ConnectError(f"{host} cannot be found") from error
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout)
