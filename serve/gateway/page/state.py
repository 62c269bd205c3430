"""The server's work now and in the last minutes, for people to look at.

Every few seconds the engines' metrics are read from Triton's metrics page. Requests get the figures
that were read last, so many requests cost nothing.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve.contract.messages import Request
from serve.gateway.background import Background
from serve.gateway.context import Services
from serve.speech.languages import LANGUAGE_NAMES

INTERVAL_S = 3.0
WINDOW_S = 300.0

_INFO = "earshot_engine_info"
_COUNTERS = ("earshot_audio_seconds_total", "earshot_busy_seconds_total")
_GAUGES = {
    "queue": "earshot_queue_depth",
    "slots_busy": "earshot_busy_slots",
    "slots": "earshot_slots",
}
_METRICS = {_INFO, *_COUNTERS, *_GAUGES.values()}


class _EngineMetrics:
    """An engine's metrics at the latest read, and the rises of its counters in the window.

    Args:
        read_page: reads the engine's metrics page from its Triton; raises an OSError if it is away.
    """

    def __init__(self, read_page: Callable[[], Awaitable[bytes]]) -> None:
        self.read_page = read_page
        self.capabilities: dict[str, Any] | None = None  # None: the engine is away
        self.gauges = dict.fromkeys(_GAUGES, 0)
        rises = deque[tuple[float, float]](maxlen=round(WINDOW_S / INTERVAL_S))
        self.rises = rises  # seconds of audio that were answered, and of work
        self._counters: tuple[float, ...] = ()  # empty: the engine has not been seen yet

    async def read(self) -> None:
        """Read the metrics now. A counter that has fallen has started from 0."""
        try:
            page = (await self.read_page()).decode()
        except OSError:
            page = ""
        lines = [line for line in page.splitlines() if line.startswith("earshot_")]
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        samples = {sample.name: sample for family in families for sample in family.samples}
        self.capabilities, audio_s, busy_s = None, 0.0, 0.0
        if samples.keys() >= _METRICS:  # else the engine starts or stops
            self.capabilities = _capabilities(samples[_INFO].labels)
            self.gauges = {name: int(samples[metric].value) for name, metric in _GAUGES.items()}
            counters = tuple(samples[name].value for name in _COUNTERS)
            if self._counters:
                audio_s, busy_s = (
                    after - before if after >= before else after
                    for before, after in zip(self._counters, counters, strict=True)
                )
            self._counters = counters
        self.rises.append((audio_s, busy_s))


class EngineStateReader(Background):
    """Reads the server's state at intervals, as long as it is started.

    Args:
        services: the gateway's services.
        pages: read each engine's metrics page from its Triton; raise an OSError if that is away.
    """

    def __init__(self, services: Services, pages: Sequence[Callable[[], Awaitable[bytes]]]) -> None:
        self._services = services
        self._engines = list(map(_EngineMetrics, pages))
        self._ready = False
        self.latest = self._as_json()
        """The latest state, as the page reads it."""

    async def read(self) -> None:
        """Read the state now."""
        self._ready = await self._services.ready()
        for engine in self._engines:
            await engine.read()
        self.latest = self._as_json()

    def _as_json(self) -> dict[str, Any]:
        services, config = self._services, self._services.config
        available = [engine for engine in self._engines if engine.capabilities]
        reads = list(zip(*(engine.rises for engine in self._engines), strict=True))
        audio_s = [sum(audio_s for audio_s, _ in rises) for rises in reads]
        busy_s = [sum(busy_s for _, busy_s in engine.rises) for engine in self._engines]
        longest_s = max(busy_s, default=0.0)  # engines work in the same seconds
        status = "ready" if self._ready else "starting"
        now = {name: sum(engine.gauges[name] for engine in available) for name in _GAUGES}
        transcriber = config.transcriber
        return {
            "name": config.name,
            "status": "draining" if services.admission.draining else status,
            "offers": available[0].capabilities if available else None,
            "defaults": {
                "beam_size": transcriber.beam_size,
                "vad": transcriber.vad,
                "mode": Request.mode,
            },
            "jobs": bool(config.jobs.folder),
            "limits": {"request_bytes": config.server.max_request_mb * 2**20},
            "now": now if available else None,
            "engines": [
                {
                    "name": engine.name,
                    "models": {engine.model: engine.is_available()},
                    "requests": engine.inflight,
                }
                for engine in services.engines.all
            ],
            "recent": {
                "window_s": WINDOW_S,
                "rtfx": sum(audio_s) / longest_s if longest_s else None,
                **_latencies(services.metrics.recent_s(WINDOW_S)),
            },
            "history": {
                "interval_s": INTERVAL_S,
                "audio_per_s": [round(seconds / INTERVAL_S, 2) for seconds in audio_s],
            },
        }

    async def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            await self.read()
            next_s = max(next_s + INTERVAL_S, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())


def _capabilities(labels: dict[str, str]) -> dict[str, Any]:
    codes = labels["languages"].split(",")
    return {
        "languages": {code: LANGUAGE_NAMES.get(code, code) for code in codes},
        "detects_language": labels["detects_language"] == "true",
        "beams": int(labels["beams"]),
        "words": labels["words"] == "true",
    }


def _latencies(seconds: list[float]) -> dict[str, Any]:
    ranked = sorted(seconds)

    def quantile(share: float) -> float | None:
        return ranked[math.ceil(share * len(ranked)) - 1] if ranked else None

    return {"requests": len(ranked), "p50_s": quantile(0.5), "p99_s": quantile(0.99)}
