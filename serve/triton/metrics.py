"""What the server publishes for Prometheus, computed from a transcriber's `Stats`."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from serve.transcriber.stats import Stats

Kind = Literal["counter", "gauge"]


@dataclasses.dataclass(frozen=True)
class Series:
    """One value of one metric."""

    value: Callable[[Stats], float]
    labels: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """A metric and its values; one for each set of labels."""

    name: str
    kind: Kind
    description: str
    series: tuple[Series, ...]


def _counter(name: str, description: str, value: Callable[[Stats], float]) -> Family:
    return Family(f"earshot_{name}", "counter", description, (Series(value),))


def _gauge(name: str, description: str, value: Callable[[Stats], float]) -> Family:
    return Family(f"earshot_{name}", "gauge", description, (Series(value),))


FAMILIES = (
    Family(
        "earshot_requests_total",
        "counter",
        "Requests by how they ended, the warm-up included; rejected = refused at once",
        (
            Series(lambda stats: stats.ok, {"outcome": "ok"}),
            Series(lambda stats: stats.failed, {"outcome": "failed"}),
            Series(lambda stats: stats.cancelled, {"outcome": "cancelled"}),
            Series(lambda stats: stats.timed_out, {"outcome": "timed_out"}),
            Series(lambda stats: stats.rejected, {"outcome": "rejected"}),
        ),
    ),
    _counter("accepted_total", "Requests taken in", lambda stats: stats.accepted),
    _counter("windows_total", "Windows decoded, first tries", lambda stats: stats.windows),
    _counter(
        "retries_total",
        "Windows decoded again at a higher temperature",
        lambda stats: stats.retries,
    ),
    _counter("tokens_total", "Tokens sampled", lambda stats: stats.tokens),
    _counter("audio_seconds_total", "Audio answered, unpadded", lambda stats: stats.audio_s),
    _counter("busy_seconds_total", "Time with a request pending", lambda stats: stats.busy_s),
    _counter("encode_seconds_total", "Time spent encoding", lambda stats: stats.encode_s),
    _counter("decode_seconds_total", "Time spent decoding", lambda stats: stats.decode_s),
    _gauge("pending_requests", "Requests not yet ended", lambda stats: stats.pending),
    _gauge("queue_depth", "Requests not yet started", lambda stats: stats.queued),
    _gauge("busy_slots", "Windows decoding now", lambda stats: stats.busy_slots),
    _gauge("batch_size", "Mean windows in a decoder step", lambda stats: stats.mean_batch),
    _gauge("rtfx", "Seconds of audio answered for each busy second", lambda stats: stats.rtfx),
)
