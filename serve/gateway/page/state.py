"""The server's state now, for people to look at; the figures are from Triton's metrics page."""

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serve.contract.messages import Request
from serve.gateway.context import Services
from serve.gateway.observe.metrics import tritons_page
from serve.speech.languages import LANGUAGE_NAMES

_INFO = "earshot_engine_info"
_GAUGES = {
    "queue": "earshot_queue_depth",
    "slots_busy": "earshot_busy_slots",
    "slots": "earshot_slots",
}


async def state_of(services: Services) -> dict[str, Any]:
    """Return the server's state now, as the page reads it."""
    config, ready = services.config, await services.ready()
    found = [await _samples(engine.address.link) for engine in services.engines.own]
    # An engine that starts or stops has a part of its metrics.
    engines = [samples for samples in found if samples.keys() >= {_INFO, *_GAUGES.values()}]
    search = config.transcriber
    now = {name: sum(int(one[metric].value) for one in engines) for name, metric in _GAUGES.items()}
    shown = [{"name": one.name, "available": one.is_available()} for one in services.engines.all]
    status = "ready" if ready else "starting"
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
