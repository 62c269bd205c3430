"""A server that runs, seen from outside: its processes by what they do, and its metrics."""

import contextlib
import http.client
import re
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from eval.processes import descendants


def by_role(root: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield a process and all below it, by what they do; those that have ended are left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(root), *descendants(root)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield role_of(process.cmdline()), process


def role_of(command: Sequence[str]) -> str:
    """Name what a process of a server does, by its command line."""
    line = " ".join(command)
    if match := re.search(r"python_backend_stub \S*/models/(\w+)/", line):
        return match[1]
    if "serve.gateway" in line:
        return "gateway"
    if "sandbox.server" in line:
        return "sandbox"
    if command and Path(command[0]).name == "tritonserver":
        return "tritonserver"
    return "supervisor" if "-m serve triton" in line else line[:60] or "unnamed"


def cpu_s(process: psutil.Process) -> float:
    """Return the processor time so far, of all its threads; 0 once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def connect(address: str, timeout_s: float) -> socket.socket:
    """Open a connection to host:port; raises OSError."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


def post(
    address: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send one POST over a connection of its own; returns the answer and its body.

    Raises:
        OSError, http.client.HTTPException: there is no whole answer.
    """
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer, answer.read()


def samples(page: str, name: str) -> list[Sample]:
    """Return the samples of a name in a page of metrics, in Prometheus' text format."""
    families = text_string_to_metric_families(page)
    return [sample for family in families for sample in family.samples if sample.name == name]


def total(page: str, name: str) -> float:
    """Return the sum of a metric over all of its labels; 0 where the page lacks it."""
    return sum(sample.value for sample in samples(page, name))


def metrics_page(address: str) -> str:
    """Read the metrics page of a server at this address; raises OSError."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
