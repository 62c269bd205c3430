"""Connections: how soon one that is kept is answered again, and what those cost that do nothing."""

import contextlib
import dataclasses
import http.client
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import psutil
from websockets.sync.client import connect

from eval.server import cpu_s
from serve.supervisor.run import Server

_SETTLE_S = 2.0
_WAIT_S = 30.0
_REQUESTS = 200  # on a kept connection
_SERVER_LIVE = "/inference.GRPCInferenceService/ServerLive"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Idle:
    """The cost of so many connections of a kind."""

    kind: str
    connections: int
    cpu_percent: float  # of a core
    memory_mib: float  # more than without them

    def __str__(self) -> str:
        """Write a line of the report."""
        return (
            f"{self.connections} idle connections, {self.kind:10} {self.cpu_percent:6.2f} % of a "
            f"core, {self.memory_mib:6.1f} MiB"
        )


def measure_idle(
    server: Server, process: psutil.Process, connections: int, seconds: float
) -> Iterator[Idle]:
    """Measure what no connections cost, and then so many of each kind.

    Args:
        server: it.
        process: its gateway.
        connections: how many.
        seconds: for which they do nothing.
    """
    for kind, open_one in KINDS.items():
        with open_one(server):  # what the first of them takes, all later ones share
            pass
        yield _measure(f"no {kind}", 0, server, process, open_one, seconds)
        yield _measure(kind, connections, server, process, open_one, seconds)


Opener = Callable[[Server], contextlib.AbstractContextManager[None]]


def _measure(
    kind: str,
    connections: int,
    server: Server,
    process: psutil.Process,
    open_one: Opener,
    seconds: float,
) -> Idle:
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(open_one(server))
        time.sleep(_SETTLE_S)
        began, began_s = cpu_s(process), time.monotonic()
        time.sleep(seconds)
        share = (cpu_s(process) - began) / (time.monotonic() - began_s)
        memory = process.memory_info().rss - before
    return Idle(kind, connections, 100 * share, memory / _MIB)


@contextlib.contextmanager
def _http(server: Server) -> Iterator[None]:
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=_WAIT_S)) as connection:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        yield


@contextlib.contextmanager
def _grpc(server: Server) -> Iterator[None]:
    own = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share a connection
    with grpc.insecure_channel(server.grpc, options=own) as channel:
        channel.unary_unary(_SERVER_LIVE)(b"", timeout=_WAIT_S)
        yield


@contextlib.contextmanager
def _websocket(server: Server) -> Iterator[None]:
    with connect(f"ws://{server.http}/v1/realtime", open_timeout=_WAIT_S) as connection:
        connection.recv(timeout=_WAIT_S)
        yield


KINDS: dict[str, Opener] = {"HTTP": _http, "gRPC": _grpc, "WebSocket": _websocket}


@dataclasses.dataclass(frozen=True)
class Kept:
    """Answers with a body, one after another."""

    median_ms: float
    p99_ms: float

    def __str__(self) -> str:
        """Write a line of the report."""
        return (
            f"a kept connection's answer with a body, {_REQUESTS} in turn: median "
            f"{self.median_ms:.2f} ms, 99 of 100 within {self.p99_ms:.2f} ms"
        )


def measure_kept(address: str) -> Kept:
    """Ask a gateway for its models, over and over.

    Args:
        address: of its HTTP.
    """
    took_s = []
    connection = http.client.HTTPConnection(address, timeout=_WAIT_S)
    with contextlib.closing(connection):
        for _ in range(_REQUESTS + 1):
            began_s = time.perf_counter()
            connection.request("GET", "/v1/models")
            connection.getresponse().read()
            took_s.append(time.perf_counter() - began_s)
    median, p99 = np.percentile(np.array(took_s[1:]) * 1e3, (50, 99))
    return Kept(float(median), float(p99))
