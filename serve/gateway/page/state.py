"""The server's state now, for people to look at.

Every few seconds the engines' metrics are read from Triton's metrics page. Requests get the figures
that were read last, so many requests cost nothing.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serve.contract.messages import Request
from serve.gateway.background import Background
from serve.gateway.context import Services
from serve.gateway.observe.pages import tritons_page
from serve.speech.languages import LANGUAGE_NAMES

INTERVAL_S = 3.0

_INFO = "earshot_engine_info"
_GAUGES = {
    "queue": "earshot_queue_depth",
    "slots_busy": "earshot_busy_slots",
    "slots": "earshot_slots",
}


class EngineStateReader(Background):
    """Reads the server's state at intervals, as long as it is started.

    Args:
        services: the gateway's services.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.latest = self._as_json(False, [])
        """The latest state, as the page reads it."""

    async def read(self) -> None:
        """Read the state now."""
        services, ready = self._services, await self._services.ready()
        engines = [await _samples(engine.address.link) for engine in services.engines.own]
        # An engine that starts or stops has a part of its metrics.
        available = [samples for samples in engines if samples.keys() >= {_INFO, *_GAUGES.values()}]
        self.latest = self._as_json(ready, available)

    def _as_json(self, ready: bool, engines: Sequence[dict[str, Sample]]) -> dict[str, Any]:
        services, config = self._services, self._services.config
        search, status = config.transcriber, "ready" if ready else "starting"
        now = {
            name: sum(int(samples[metric].value) for samples in engines)
            for name, metric in _GAUGES.items()
        }
        every = services.engines.all
        shown = [{"name": one.name, "available": one.is_available()} for one in every]
        return {
            "name": config.name,
            "status": "draining" if services.admission.draining else status,
            "offers": _capabilities(engines[0][_INFO].labels) if engines else None,
            "defaults": {"beam_size": search.beam_size, "vad": search.vad, "mode": Request.mode},
            "jobs": bool(config.jobs.folder),
            "limits": {"request_bytes": config.server.max_request_mb * 2**20},
            "now": now if engines else None,
            "engines": shown,
        }

    async def _run(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(INTERVAL_S)


async def _samples(triton: Path) -> dict[str, Sample]:
    """Read an engine's metrics; none while it is away."""
    try:
        page = (await tritons_page(triton)).decode()
    except OSError:
        return {}
    lines = [line for line in page.splitlines() if line.startswith("earshot_")]
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    return {sample.name: sample for family in families for sample in family.samples}


def _capabilities(labels: dict[str, str]) -> dict[str, Any]:
    codes = labels["languages"].split(",")
    return {
        "languages": {code: LANGUAGE_NAMES.get(code, code) for code in codes},
        "detects_language": labels["detects_language"] == "true",
        "beams": int(labels["beams"]),
        "words": labels["words"] == "true",
    }
