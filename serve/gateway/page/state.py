"""The server's work of the last minutes and of now, for people to look at.

A look every few seconds reads the engine's own numbers from Triton's page of metrics; whoever asks
gets what the last look found, so that many who ask cost nothing.
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

from serve.contract.config import Config
from serve.contract.messages import Request
from serve.gateway.background import Background
from serve.gateway.door import Door
from serve.speech.languages import LANGUAGE_NAMES

INTERVAL_S = 3.0
WINDOW_S = 300.0

_PREFIX = "earshot_"
_INFO = f"{_PREFIX}engine_info"
_COUNTED = {"audio_seconds_total", "busy_seconds_total", "queue_depth", "busy_slots", "slots"}
_LOOKS = round(WINDOW_S / INTERVAL_S)


@dataclasses.dataclass(frozen=True)
class Look:
    """One look at the metrics of an engine."""

    # Since the engine started; None: it has not been seen yet.
    audio_s: float | None = None  # of the requests that were answered
    busy_s: float | None = None  # in which there were requests
    queue: int = 0  # requests that are not yet started
    slots_busy: int = 0
    slots: int = 0
    offers: dict[str, Any] | None = None  # what the engine can do; None: it is away


class State(Background):
    """Looks at the server as long as it is started.

    Args:
        door: the gateway's, which knows how long its requests took.
        config: names the product, its defaults and its limits.
        pages: of each engine, the page of metrics of its Triton; an OSError where that is away.
    """

    def __init__(
        self, door: Door, config: Config, pages: Sequence[Callable[[], Awaitable[bytes]]]
    ) -> None:
        self._door = door
        self._config = config
        self._pages = pages
        # Of each engine.
        self._looks = [deque([Look()], maxlen=_LOOKS + 1) for _ in pages]
        self._ready = False
        self.found = self._tell()
        """The last look, as the page reads it."""

    async def look(self) -> None:
        """Look now."""
        self._ready = await self._door.ready()
        for read, looks in zip(self._pages, self._looks, strict=True):
            try:
                page = await read()
            except OSError:
                page = b""
            looks.append(look_at(page, looks[-1]))
        self.found = self._tell()

    def _tell(self) -> dict[str, Any]:
        last = [looks[-1] for looks in self._looks if looks[-1].offers]  # of those that are there
        offers = last[0].offers if last else None
        audio_s = [sum(rises) for rises in zip(*map(_audio_s, self._looks), strict=True)]
        busy_s = max(map(_busy_s, self._looks), default=0.0)
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
                name: sum(getattr(look, name) for look in last)
                for name in ("queue", "slots_busy", "slots")
            },
            "upstreams": [
                {
                    "name": upstream.name,
                    "models": {upstream.model: upstream.takes()},
                    "requests": upstream.inflight,
                }
                for upstream in self._door.upstreams.servers
            ],
            "recent": {
                "window_s": WINDOW_S,
                "rtfx": sum(audio_s) / busy_s if busy_s else None,
                **_latencies(self._door.metrics.recent_s(WINDOW_S)),
            },
            "history": {
                "interval_s": INTERVAL_S,
                "audio_per_s": [round(rise / INTERVAL_S, 2) for rise in audio_s],
            },
        }

    def _status(self) -> str:
        if self._door.admission.draining:
            return "draining"
        return "ready" if self._ready else "starting"

    async def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            await self.look()
            next_s = max(next_s + INTERVAL_S, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())


def look_at(page: bytes, before: Look) -> Look:
    """Read a page of metrics.

    Args:
        page: in Prometheus's text format; empty where there is none.
        before: whose counters stay where the engine is away and has none.
    """
    lines = (line for line in page.decode().splitlines() if line.startswith(_PREFIX))
    values: dict[str, float] = {}
    offers = None
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values[sample.name.removeprefix(_PREFIX)] = sample.value
            if sample.name == _INFO:
                offers = _offers(sample.labels)
    if offers is None or not values.keys() >= _COUNTED:  # it starts or ends, one by one
        return dataclasses.replace(before, queue=0, slots_busy=0, offers=None)
    return Look(
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


def _audio_s(looks: Iterable[Look]) -> list[float]:
    """Return the seconds of audio that an engine answered from each look to the next."""
    return _rises(look.audio_s for look in looks)


def _busy_s(looks: Iterable[Look]) -> float:
    """Return for how long an engine had requests."""
    return sum(_rises(look.busy_s for look in looks))


def _rises(counter: Iterable[float | None]) -> list[float]:
    """Return what a counter grew by from each look to the next; a fall is a new start from 0."""
    return [
        0.0 if before is None or after is None else after - before if after >= before else after
        for before, after in itertools.pairwise(counter)
    ]


def _latencies(seconds: list[float]) -> dict[str, Any]:
    ranked = sorted(seconds)

    def quantile(share: float) -> float | None:
        return ranked[math.ceil(share * len(ranked)) - 1] if ranked else None

    return {"requests": len(ranked), "p50_s": quantile(0.5), "p99_s": quantile(0.99)}
