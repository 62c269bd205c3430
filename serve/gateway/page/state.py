"""The server's work now and in the last minutes, for people to look at.

Every few seconds the engines' metrics are read from Triton's metrics page. Requests get the figures
that were read last, so many requests cost nothing.
"""

import asyncio
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve.contract.messages import Request
from serve.gateway.background import Background
from serve.gateway.context import Services
from serve.speech.languages import LANGUAGE_NAMES

INTERVAL_S = 3.0
WINDOW_S = 300.0

_PREFIX = "earshot_"
_INFO = f"{_PREFIX}engine_info"
_COUNTED = {"audio_seconds_total", "busy_seconds_total", "queue_depth", "busy_slots", "slots"}
_SNAPSHOTS = round(WINDOW_S / INTERVAL_S)


@dataclasses.dataclass(frozen=True)
class MetricsSnapshot:
    """An engine's metrics at one time."""

    # Since the engine started; None: it has not been seen yet.
    audio_s: float | None = None  # audio of the requests that were answered
    busy_s: float | None = None  # time in which there were requests
    queue: int = 0  # requests that are not started yet
    slots_busy: int = 0
    slots: int = 0
    offers: dict[str, Any] | None = None  # the engine's capabilities; None: it is away


class EngineStateReader(Background):
    """Reads the server's state at intervals, as long as it is started.

    Args:
        services: the gateway's services.
        pages: read each engine's metrics page from its Triton; raise an OSError if that is away.
    """

    def __init__(self, services: Services, pages: Sequence[Callable[[], Awaitable[bytes]]]) -> None:
        self._services = services
        self._config = services.config
        self._pages = pages
        self._snapshots = [deque([MetricsSnapshot()], maxlen=_SNAPSHOTS + 1) for _ in pages]
        self._ready = False
        self.found = self._as_json()
        """The latest state, as the page reads it."""

    async def read(self) -> None:
        """Read the state now."""
        self._ready = await self._services.ready()
        for read_page, snapshots in zip(self._pages, self._snapshots, strict=True):
            try:
                page = await read_page()
            except OSError:
                page = b""
            snapshots.append(read_metrics(page, snapshots[-1]))
        self.found = self._as_json()

    def _as_json(self) -> dict[str, Any]:
        last = [one[-1] for one in self._snapshots if one[-1].offers]  # of the engines at work
        offers = last[0].offers if last else None
        audio = [_rises(one.audio_s for one in snapshots) for snapshots in self._snapshots]
        audio_s = [sum(rises) for rises in zip(*audio, strict=True)]
        busy = [_rises(one.busy_s for one in snapshots) for snapshots in self._snapshots]
        busy_s = max(map(sum, busy), default=0.0)
        server, transcriber = self._config.server, self._config.transcriber
        return {
            "name": self._config.name,
            "status": self._status(),
            "offers": offers,
            "defaults": {
                "beam_size": transcriber.beam_size,
                "vad": transcriber.vad,
                "mode": Request.mode,
            },
            "jobs": bool(self._config.jobs.folder),
            "limits": {"request_bytes": server.max_request_mb * 2**20},
            "now": offers
            and {
                name: sum(getattr(one, name) for one in last)
                for name in ("queue", "slots_busy", "slots")
            },
            "engines": [
                {
                    "name": upstream.name,
                    "models": {upstream.model: upstream.is_available()},
                    "requests": upstream.inflight,
                }
                for upstream in self._services.engines.all
            ],
            "recent": {
                "window_s": WINDOW_S,
                "rtfx": sum(audio_s) / busy_s if busy_s else None,
                **_latencies(self._services.metrics.recent_s(WINDOW_S)),
            },
            "history": {
                "interval_s": INTERVAL_S,
                "audio_per_s": [round(rise / INTERVAL_S, 2) for rise in audio_s],
            },
        }

    def _status(self) -> str:
        if self._services.admission.draining:
            return "draining"
        return "ready" if self._ready else "starting"

    async def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            await self.read()
            next_s = max(next_s + INTERVAL_S, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())


def read_metrics(page: bytes, before: MetricsSnapshot) -> MetricsSnapshot:
    """Read a metrics page.

    Args:
        page: the page in Prometheus's text format; empty if the engine is away.
        before: the previous snapshot; its counters stay while the engine is away.
    """
    lines = (line for line in page.decode().splitlines() if line.startswith(_PREFIX))
    values: dict[str, float] = {}
    offers = None
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values[sample.name.removeprefix(_PREFIX)] = sample.value
            if sample.name == _INFO:
                offers = _offers(sample.labels)
    if offers is None or not values.keys() >= _COUNTED:  # the engine starts or stops
        return dataclasses.replace(before, queue=0, slots_busy=0, offers=None)
    return MetricsSnapshot(
        audio_s=values["audio_seconds_total"],
        busy_s=values["busy_seconds_total"],
        queue=int(values["queue_depth"]),
        slots_busy=int(values["busy_slots"]),
        slots=int(values["slots"]),
        offers=offers,
    )


def _offers(labels: dict[str, str]) -> dict[str, Any]:
    return {
        "languages": {
            code: LANGUAGE_NAMES.get(code, code) for code in labels["languages"].split(",")
        },
        "detects_language": labels["detects_language"] == "true",
        "beams": int(labels["beams"]),
        "words": labels["words"] == "true",
    }


def _rises(counter: Iterable[float | None]) -> list[float]:
    """Return the rises of a counter; a fall is a new start from 0."""
    return [
        0.0 if before is None or after is None else after - before if after >= before else after
        for before, after in itertools.pairwise(counter)
    ]


def _latencies(seconds: list[float]) -> dict[str, Any]:
    ranked = sorted(seconds)

    def quantile(share: float) -> float | None:
        return ranked[math.ceil(share * len(ranked)) - 1] if ranked else None

    return {"requests": len(ranked), "p50_s": quantile(0.5), "p99_s": quantile(0.99)}
