"""The sections of a configuration about the server: addresses, limits, live text, jobs, shadow."""

import dataclasses
import ipaddress
import re
from typing import Annotated, Literal

from pydantic import Field

from serve.contract.codec import text_that
from serve.contract.fields import (
    MAX_BEAMS,
    Address,
    Count,
    Device,
    Finite,
    Host,
    Name,
    NameOrNone,
    Origin,
    Port,
    Seconds,
    SecondsOrNone,
    ShortEncoder,
)

SpreadOrNone = Annotated[Finite, Field(ge=0)]
LogKind = Literal["text", "json", "off"]
UnknownFields = Literal["refuse", "ignore"]
PLACE = re.compile(r"(?:(https?)://)?((?:\*\.)?[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
"""An allowed host for URLs: a name, with https unless it says http, and perhaps a port."""
POSTGRESQL = "postgresql://"


Place = Annotated[
    str,
    text_that(
        PLACE.fullmatch,
        "a host such as files.example.org, *.example.org or http://files.example.org:8080",
    ),
]
Network = Annotated[str, text_that(ipaddress.ip_network, "a network such as 10.1.0.0/16")]
Database = Annotated[
    str,
    text_that(
        lambda text: text == "" or text.startswith(POSTGRESQL),
        f"{POSTGRESQL}host/name, or empty for a SQLite file in jobs.folder",
    ),
]


@dataclasses.dataclass(frozen=True)
class JobsConfig:
    """Keys of jobs; without a folder there are no jobs."""

    # Folder for the jobs' audio and, without `database`, for their SQLite table; empty: no jobs.
    folder: NameOrNone = ""
    # PostgreSQL database of jobs, such as `postgresql://host/name`; empty: a SQLite file.
    database: Database = ""
    # Maximum number of jobs that are transcribed concurrently.
    workers: Count = 2
    # Seconds that a job and its result are kept after its end.
    keep_s: Seconds = 86_400.0
    # Maximum number of queued and running jobs.
    max_queued: Count = 10_000
    # Hosts from which audio may be fetched, and to which webhooks may be sent; empty: none.
    allowed_hosts: tuple[Place, ...] = ()
    # Private networks that these hosts may be in.
    allowed_networks: tuple[Network, ...] = ()
    # File with the secret that signs webhooks, `whsec_` and base64; empty: no webhooks.
    webhook_secret_file: NameOrNone = ""


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The gateway's addresses, limits and timeouts."""

    # IPv4 address to listen on; 0.0.0.0: all interfaces.
    host: Address = "127.0.0.1"
    # Port of HTTP and WebSockets: OpenAI's API, KServe v2, live text, the page.
    http_port: Port = 8000
    # Port of gRPC: KServe v2.
    grpc_port: Port = 8001
    # Port of Prometheus metrics.
    metrics_port: Port = 8002
    # File of API keys that `python -m serve keys new` writes; the server reads it again when it
    # changes.
    keys_file: NameOrNone = ""
    # Turn authentication off; without keys, required to listen on more than loopback.
    open: bool = False
    # SQLite file with the daily usage of each key; empty: usage is lost when the server stops.
    usage_file: NameOrNone = ""
    # Origins of other web pages that may call the server (CORS), such as `https://example.org`.
    allowed_origins: tuple[Origin, ...] = ()
    # Accepted `Host` names besides localhost; others are rejected if this is set, or if the server
    # listens on loopback.
    allowed_hosts: tuple[Host, ...] = ()
    # PEM file with the full certificate chain; HTTP and gRPC then use TLS.
    tls_certificate: NameOrNone = ""
    # PEM file with the certificate's key, without a password.
    tls_key: NameOrNone = ""
    # Seconds until the server must be ready.
    start_timeout_s: Seconds = 180.0
    # Seconds to finish accepted requests when the server stops.
    drain_timeout_s: SecondsOrNone = 30.0
    # Maximum size of a request, in MiB.
    max_request_mb: Count = 256
    # Maximum size of all requests in flight, in MiB; each byte may be copied six times, so 1024 may
    # take 6 GB besides the engine.
    max_inflight_mb: Count = 1024
    # Maximum number of requests in flight.
    max_inflight: Count = 1024
    # Values of `model` that clients of OpenAI's API may send; * matches any text. The default
    # covers known clients.
    model_aliases: tuple[Name, ...] = (
        "whisper-1",
        "gpt-*transcribe*",
        "gpt-*realtime*",
        "whisper-*",
        "*/*whisper-*",
    )
    # Seconds to receive a whole request.
    upload_timeout_s: Seconds = 60.0
    # Seconds without a heartbeat after which an engine's process is restarted.
    stall_timeout_s: Seconds = 60.0
    # Seconds without a request after which engines are unloaded until the next request; 0: never.
    idle_unload_s: SecondsOrNone = 0.0

    @property
    def on_loopback(self) -> bool:
        """Return whether only this machine can reach `host`."""
        return ipaddress.IPv4Address(self.host).is_loopback


@dataclasses.dataclass(frozen=True)
class GatewayConfig:
    """The gateway's processes, latency target and access log."""

    # Number of gateway processes; they share the addresses, and each has an equal part of the
    # limits.
    processes: Count = 1
    # Target for the 99th percentile of a file's latency, in seconds; requests that would miss it
    # are rejected at once; 0: no target.
    target_p99_s: SecondsOrNone = 0.0
    # Access log, one line per request: text, JSON, or off.
    log: LogKind = "text"
    # Unknown form fields: reject the request, or ignore them with a warning in the answer.
    unknown_fields: UnknownFields = "ignore"


@dataclasses.dataclass(frozen=True)
class LiveConfig:
    """Keys of live text."""

    # Seconds between interim decodings of an unfinished utterance.
    update_s: Seconds = 0.5
    # Overrides `transcriber.short_encoder` for live text; `auto`: no override.
    short_encoder: ShortEncoder = "auto"
    # Maximum number of concurrent live streams.
    max_streams: Count = 64

    @property
    def asks_short_encoder(self) -> bool | None:
        """Return the option `short_encoder` of live requests; None: as in [transcriber]."""
        return None if self.short_encoder == "auto" else self.short_encoder == "on"


@dataclasses.dataclass(frozen=True)
class ShadowBaseline:
    """The distribution of score gaps between a healthy engine and its reference.

    `python -m serve shadow` prints it; see docs/operating.md. (0, 0) means unknown. If all three
    are unknown, drift is not computed.
    """

    # Mean and standard deviation of the logarithm of gaps in log-probability.
    log_probability: tuple[Finite, SpreadOrNone] = (0.0, 0.0)
    # The same for gaps in the probability of no speech.
    no_speech: tuple[Finite, SpreadOrNone] = (0.0, 0.0)
    # The same for gaps in the language's probability.
    language: tuple[Finite, SpreadOrNone] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class ShadowConfig:
    """The shadow monitor: it repeats some requests with a reference and compares the answers."""

    # Share of answered requests that are repeated with the reference; 0: none.
    share: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    # Folder of a second engine as the reference; empty: the served engine is the reference.
    engine: NameOrNone = ""
    # Beam size of the reference's requests; 0: unchanged.
    beam_size: Annotated[int, Field(ge=0, le=MAX_BEAMS)] = 0
    # Device of the reference's engine.
    device: Device = "cpu"
    # Names of the API keys that may read the texts that differ most.
    readers: tuple[Name, ...] = ()
    baseline: ShadowBaseline = ShadowBaseline()

    @property
    def opens_engine(self) -> bool:
        """Return whether the reference has its own engine."""
        return bool(self.share and self.engine)
