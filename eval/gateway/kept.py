"""A connection that is kept: how long the gateway takes to answer the next request on it."""

import contextlib
import dataclasses
import http.client
import time

import numpy as np

_WAIT_S = 30.0
_REQUESTS = 200


@dataclasses.dataclass(frozen=True)
class Kept:
    """Answers with a body, one after another."""

    median_ms: float
    p99_ms: float

    def __str__(self) -> str:
        """A line of the report."""
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
