"""Figures of a peer that is told how many tokens to decode, and checked to have done so."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from eval.bench.table import Measurement
from eval.bench.workloads import REQUEST_TOKENS, THROUGHPUT_TOKENS, mlperf_lengths
from serve.contract.errors import EarshotError
from serve.speech.features import WINDOW_S

Decode = Callable[[Sequence[int]], list[int]]
"""Decodes one window of 30 s for each length in tokens; returns, when all are done and on the host,
how many tokens each got."""

REQUESTS = 30


def seconds_of(decode: Decode, lengths: Sequence[int]) -> float:
    """Time one call.

    Raises:
        EarshotError: a length was not reached or exceeded, so the figure would mean nothing.
    """
    began = time.perf_counter()
    decoded = decode(lengths)
    wall_s = time.perf_counter() - began
    if list(decoded) != list(lengths):
        raise EarshotError(
            f"forced {len(lengths)} windows to {_few(lengths)} tokens, got {_few(decoded)} for "
            f"{len(decoded)}; this version of the peer does not keep forced lengths"
        )
    return wall_s


def _few(lengths: Sequence[int]) -> str:
    return ", ".join(str(length) for length in sorted(set(lengths))[:8])


def latency(system: str, decode: Decode, note: str) -> Measurement:
    """Measure one at a time; `decode` is given one length and makes the 10 s of sound itself."""
    for _ in range(3):
        seconds_of(decode, [REQUEST_TOKENS])
    times = sorted(1e3 * seconds_of(decode, [REQUEST_TOKENS]) for _ in range(REQUESTS))
    p50 = statistics.median(times)
    return Measurement(
        "latency",
        system,
        p50,
        "ms",
        None,
        f"p50 of {REQUESTS}, worst {times[-1]:.1f}; 10 s of sound in 30 s, {REQUEST_TOKENS} "
        f"tokens; {note}",
        {"p50_ms": p50, "worst_ms": times[-1], "requests": REQUESTS},
    )


def batched(system: str, decode: Decode, batch: int, seconds: float, note: str) -> Measurement:
    """Measure the throughput of batch after batch, each waited for, for at least `seconds`."""
    lengths = [THROUGHPUT_TOKENS] * batch
    seconds_of(decode, lengths)
    count, wall_s = 0, 0.0
    while wall_s < seconds or not count:
        wall_s += seconds_of(decode, lengths)
        count += 1
    return _throughput(system, count * batch, wall_s, f"batches of {batch}; {note}")


def queued(system: str, decode: Decode, in_flight: int, seconds: float, note: str) -> Measurement:
    """Measure throughput with all windows handed over at once, enough of them for `seconds`."""
    lengths, wall_s = offline(decode, itertools.repeat(THROUGHPUT_TOKENS), in_flight, seconds)
    return _throughput(system, len(lengths), wall_s, f"{in_flight} in flight, rest queued; {note}")


def mlperf(system: str, decode: Decode, in_flight: int, seconds: float, note: str) -> Measurement:
    """Measure as `queued`, with lengths as in MLPerf's set."""
    lengths, wall_s = offline(decode, mlperf_lengths(), in_flight, seconds)
    return Measurement(
        "MLPerf-shaped",
        system,
        len(lengths) / wall_s,
        "samples/s",
        None,
        f"{len(lengths)} windows queued at the start, {statistics.mean(lengths):.1f} tokens on "
        f"average, {in_flight} in flight, {wall_s:.1f} s; {note}",
        {"windows": len(lengths), "seconds": wall_s},
    )


def offline(
    decode: Decode, endless: Iterator[int], in_flight: int, seconds: float
) -> tuple[list[int], float]:
    """Time a call with so many windows that it lasts `seconds`; returns their lengths, too.

    The call before it, with `in_flight` windows, warms up and tells how many that may be.
    """
    lengths = list(itertools.islice(endless, in_flight))
    wall_s = seconds_of(decode, lengths)
    while True:
        count = max(2 * in_flight, math.ceil(1.2 * len(lengths) * seconds / wall_s))
        lengths += itertools.islice(endless, max(0, count - len(lengths)))
        wall_s = seconds_of(decode, lengths)
        if wall_s >= seconds:
            return lengths, wall_s


def _throughput(system: str, windows: int, wall_s: float, note: str) -> Measurement:
    return Measurement(
        "throughput",
        system,
        windows * WINDOW_S / wall_s,
        "RTFx",
        None,
        f"30 s of sound, {THROUGHPUT_TOKENS} tokens; {windows} windows in {wall_s:.1f} s, {note}",
        {"windows_per_s": windows / wall_s, "seconds": wall_s},
    )
