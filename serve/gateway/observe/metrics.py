"""Metrics for Prometheus: the gateway's, and the page of all processes of a run."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.gateway.shadow.figures import ShadowMetrics
from serve.wire.folder import METRICS_SOCKET, SUPERVISOR_PAGE, gateway_door
from serve.wire.unix_http import ask

logger = logging.getLogger("earshot.gateway")

Services = Any
"""`serve.gateway.context.Services`, which has the metrics."""

OWN_PAGE = "/metrics/own"
"""Route of the metrics of one process of the gateway."""

_PAGE_S = 2.0  # limit of asking another process for its page
_WORD_BUCKETS_S = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class LiveMetrics:
    """Metrics of live text.

    Args:
        registry: the registry that they are added to.
        streams: the open streams.
    """

    def __init__(self, registry: CollectorRegistry, streams: Sized) -> None:
        options: Any = {"namespace": "earshot_live", "registry": registry}
        Gauge("streams", "Live streams", **options).set_function(lambda: len(streams))
        self.updates = Counter("updates", "Decodings of live audio", ("outcome",), **options)
        text = "From the arrival of a word's last sample to its final text"
        self.word_seconds = Histogram("word_seconds", text, buckets=_WORD_BUCKETS_S, **options)
        text = "Words of a hypothesis that the next one did not have; none had been sent"
        self.changed = Counter("changed_words", text, **options)


class UpstreamMetrics:
    """Metrics of the engines, by device.

    Args:
        registry: the registry that they are added to.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        options: Any = {"namespace": "earshot_gateway_upstream", "registry": registry}
        text = "Requests given to a server by how it ended them, as a gRPC status"
        self.requests = Counter("requests", text, ("upstream", "status"), **options)
        text = "Requests that a server has"
        self.inflight = Gauge("inflight_requests", text, ("upstream",), **options)
        text = "Whether a server is given requests for a model"
        self.takes = Gauge("takes_requests", text, ("upstream", "model"), **options)


class Metrics:
    """All metrics of a gateway's process.

    Args:
        services: the services whose state gauges read.
    """

    def __init__(self, services: Services) -> None:
        self.registry = CollectorRegistry()
        self.live = LiveMetrics(self.registry, services.streams)
        self.upstreams = UpstreamMetrics(self.registry)
        self.shadow = ShadowMetrics(self.registry)
        options: Any = {"namespace": "earshot_gateway", "registry": self.registry}
        text = "Requests for transcripts by how the gateway answered, as a gRPC status"
        self.requests = Counter("requests", text, ("route", "status", "key"), **options)
        text = "Seconds of audio of requests that were answered, and of live streams as they come"
        self.audio_s = Counter("audio_seconds", text, ("route", "key"), **options)
        text = "Requests for transcripts that were not answered, by reason"
        self.refused = Counter("refused", text, ("reason",), **options)
        text = "Spans that have ended, were sent, could not be sent; the rest waits or is dropped"
        self.spans = Counter("spans", text, ("state",), **options)
        options_s = {**options, "labelnames": ("route",), "buckets": _BUCKETS_S}
        text = "From a request's arrival to its last answer or its client's going"
        self.seconds = Histogram("request_seconds", text, **options_s)
        text = "From a streamed request's arrival to its first text"
        self.first_delta_s = Histogram("first_delta_seconds", text, **options_s)
        longest = "Longest that the loop was at one thing in the last minute, to 50 ms"
        unwritten = "Seconds of audio that keys have had and that are not yet in server.usage_file"
        uploading, waiting = "Of gRPC messages not whole yet", "Connections that cost much and wait"
        admission, target = services.admission, services.target
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

    def page(self) -> bytes:
        """Write the gateway's part of the page."""
        return generate_latest(self.registry)


async def whole_page(services: Services) -> bytes:
    """Write the page of all processes of a run; a process that is away has no part in it.

    If the gateway has several processes, their metrics have the process's number as a label.
    """
    pages, own_page = {}, services.metrics.page()
    for engine in services.engines.own:
        try:
            pages[engine.name] = await tritons_page(engine.address.link)
        except OSError as error:
            if engine.address.link.exists():  # else it is unloaded
                logger.warning("the metrics of Triton of %s cannot be had: %s", engine.name, error)
    parts = [joined(pages, "device")]
    with contextlib.suppress(OSError):  # before the supervisor has written one, or without one
        parts.append((services.folder / SUPERVISOR_PAGE).read_bytes())
    gateways = {str(services.process_number): own_page}
    for number in sorted(set(range(services.config.gateway.processes)) - {services.process_number}):
        with contextlib.suppress(OSError):  # it is being started again
            gateways[str(number)] = await _page_of(gateway_door(services.folder, number), OWN_PAGE)
    parts.append(joined(gateways, "process") if services.config.gateway.processes > 1 else own_page)
    return b"".join(part if part.endswith(b"\n") else part + b"\n" for part in parts if part)


def joined(pages: Mapping[str, bytes], label: str) -> bytes:
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
