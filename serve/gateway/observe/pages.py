"""The gauges of a gateway's state, and the page of the metrics of all processes of a run."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from serve.gateway.context import Services
from serve.wire.folder import METRICS_SOCKET, SUPERVISOR_PAGE, gateway_socket
from serve.wire.unix_http import ask

logger = logging.getLogger("earshot.gateway")

OWN_PAGE = "/metrics/own"
"""Route of the metrics of one process of the gateway."""

_PAGE_S = 2.0  # limit of asking another process for its page


def add_gauges(services: Services) -> None:
    """Add gauges that read the state of the services to their metrics."""
    admission, target = services.admission, services.target
    longest = "Longest that the loop was at one thing in the last minute, to 50 ms"
    unwritten = "Seconds of audio that keys have had and that are not yet in server.usage_file"
    uploading, waiting = "Of gRPC messages not whole yet", "Connections that cost much and wait"
    options: Any = {"namespace": "earshot_gateway", "registry": services.metrics.registry}
    for name, text, read in (
        ("inflight_bytes", "Bytes of requests under way", lambda: admission.bytes),
        ("inflight_requests", "Requests under way", lambda: admission.requests),
        ("inflight_upload_bytes", uploading, lambda: admission.uploading_bytes),
        ("longest_turn_seconds", longest, lambda: services.watch.longest_s),
        ("waiting_turns", f"{waiting} for a turn", lambda: services.budget.waiting),
        ("unwritten_usage_seconds", unwritten, lambda: services.usage.unwritten_s),
    ):
        Gauge(name, text, **options).set_function(read)
    if target is not None:
        options["namespace"] = "earshot_gateway_target"
        text = "Within which 99 of 100 requests are to be answered"
        Gauge("seconds", text, **options).set(target.target_s)
        options["labelnames"] = ("model",)
        text = "In which 30 s of audio would be answered now"
        forecast = Gauge("forecast_seconds", text, **options).labels(services.config.name)
        forecast.set_function(lambda: target.forecast_s)
        text = "Audio, in whole windows, that is decoded in a second"
        rate = Gauge("rate", text, **options).labels(services.config.name)
        rate.set_function(lambda: target.rate)


async def whole_page(services: Services) -> bytes:
    """Return the page of all processes of a server, without those that do not respond.

    If the gateway has several processes, their metrics have the process's number as a label.
    """
    pages, own_page = {}, services.metrics.page()
    folder, own_number = services.folder, services.process_number
    processes = services.config.gateway.processes
    for engine in services.engines.own:
        try:
            pages[engine.name] = await tritons_page(engine.address.link)
        except OSError as error:
            if engine.address.link.exists():  # else it is unloaded
                logger.warning("the metrics of Triton of %s cannot be had: %s", engine.name, error)
    parts = [merge_pages(pages, "device")]
    with contextlib.suppress(OSError):  # there is no supervisor, or it has not written its page yet
        parts.append((folder / SUPERVISOR_PAGE).read_bytes())
    gateways = {str(own_number): own_page}
    for number in sorted(set(range(processes)) - {own_number}):
        with contextlib.suppress(OSError):  # it is being started again
            gateways[str(number)] = await _page_of(gateway_socket(folder, number), OWN_PAGE)
    parts.append(merge_pages(gateways, "process") if processes > 1 else own_page)
    return b"".join(part if part.endswith(b"\n") else part + b"\n" for part in parts if part)


def merge_pages(pages: Mapping[str, bytes], label: str) -> bytes:
    """Join the pages of several processes; each sample gets a label that names its process.

    In Prometheus's text format the lines of a metric are consecutive, its description first.
    """
    metrics: dict[str, tuple[list[str], list[str]]] = {}  # by name: description, samples
    for process, page in pages.items():
        description, samples = metrics.setdefault("", ([], []))
        for line in page.decode().splitlines():
            if line.startswith("# "):
                description, samples = metrics.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in description:
                    description.append(line)
            elif sample := re.match(r"([^\s{]+)(?:\{(.*)\})? (.*)", line):
                labels = ",".join(filter(None, (f'{label}="{process}"', sample[2])))
                samples.append(f"{sample[1]}{{{labels}}} {sample[3]}")
    lines = [line for blocks in metrics.values() for block in blocks for line in block]
    return "".join(f"{line}\n" for line in lines).encode()


async def tritons_page(folder: Path) -> bytes:
    """Return the page of the Triton in this folder.

    Raises:
        OSError: Triton is away.
    """
    return await _page_of(folder / METRICS_SOCKET, "/metrics")


async def _page_of(socket: Path, page: str) -> bytes:
    return await asyncio.to_thread(ask, socket, page, _PAGE_S)
