"""Sections of a configuration about the server: addresses, admission, live text, and the shadow
monitor."""

import dataclasses
import ipaddress
from typing import Annotated, Literal

from pydantic import Field

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


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The gateway's addresses, what it lets in, and how long things may take."""

    # IPv4 address to listen on; 0.0.0.0: on every interface.
    host: Address = "127.0.0.1"
    # Port of HTTP and WebSockets: OpenAI's API, KServe v2, live text, the page.
    http_port: Port = 8000
    # Port of gRPC: KServe v2.
    grpc_port: Port = 8001
    # Port of Prometheus metrics.
    metrics_port: Port = 8002
    # File of API keys, which `python -m serve keys new` writes; the server reads it again when it
    # changes.
    keys_file: NameOrNone = ""
    # Let everybody in; without keys the server needs it to listen beyond this machine.
    open: bool = False
    # SQLite file that counts what each key has had by day; empty: forgotten at the end.
    usage_file: NameOrNone = ""
    # Pages of other hosts whose requests browsers may send, as `https://example.org`.
    allowed_origins: tuple[Origin, ...] = ()
    # Names besides localhost by which clients may call the server; then, and on loopback, other
    # `Host` headers are refused.
    allowed_hosts: tuple[Host, ...] = ()
    # PEM file with the whole chain; HTTP and gRPC then speak TLS.
    tls_certificate: NameOrNone = ""
    # PEM file with the certificate's key, without a password.
    tls_key: NameOrNone = ""
    # Seconds within which the server must be ready.
    start_timeout_s: Seconds = 180.0
    # Seconds for accepted requests when the server stops.
    drain_timeout_s: SecondsOrNone = 30.0
    # MiB of one request at most.
    max_request_mb: Count = 256
    # MiB of all requests between arrival and answer; each byte is there six times for a moment, so
    # 1024 may take 6 GB beside the engine.
    max_inflight_mb: Count = 1024
    # Requests between arrival and answer at most.
    max_inflight: Count = 1024
    # What clients of OpenAI's API may write for `model`; * is any text, and the default is what
    # known clients send.
    model_aliases: tuple[Name, ...] = (
        "whisper-1",
        "gpt-*transcribe*",
        "gpt-*realtime*",
        "whisper-*",
        "*/*whisper-*",
    )
    # Seconds within which a request must arrive.
    upload_timeout_s: Seconds = 60.0
    # Seconds without a sign of life after which a model's process is started again.
    stall_timeout_s: Seconds = 60.0
    # Seconds without a request after which engines are unloaded until the next request; 0: never.
    idle_unload_s: SecondsOrNone = 0.0

    @property
    def on_loopback(self) -> bool:
        """Tell whether `host` is reached from this machine alone."""
        return ipaddress.IPv4Address(self.host).is_loopback


@dataclasses.dataclass(frozen=True)
class GatewayConfig:
    """The gateway's processes, and what they say of requests."""

    # Gateway processes, which share the addresses and, in equal parts, the limits.
    processes: Count = 1
    # Seconds within which 99 of 100 files are answered; a request that would miss it is refused at
    # once; 0: no target.
    target_p99_s: SecondsOrNone = 0.0
    # A log line for each request: text, JSON, or none.
    log: LogKind = "text"
    # Form fields that no API has: refuse them, or ignore and name them in the answer.
    unknown_fields: UnknownFields = "ignore"


@dataclasses.dataclass(frozen=True)
class LiveConfig:
    """Keys of live text, and of what a stream may cost."""

    # Seconds between two decodings of an utterance that is not over.
    update_s: Seconds = 0.5
    # As `transcriber.short_encoder`, for live text; `auto`: as that key says.
    short_encoder: ShortEncoder = "auto"
    # Live streams at a time at most.
    max_streams: Count = 64

    @property
    def asks_short_encoder(self) -> bool | None:
        """What requests for live text ask for; None: as in [transcriber]."""
        return None if self.short_encoder == "auto" else self.short_encoder == "on"


@dataclasses.dataclass(frozen=True)
class ShadowBaseline:
    """What gaps between the answers of a sound engine and its reference are like.

    `python -m serve shadow` tells them; see docs/operating.md. A kind of (0, 0) is not known; if
    none is, no drift is told.
    """

    # Mean and standard deviation of the logarithm of gaps in log-probability.
    log_probability: tuple[Finite, SpreadOrNone] = (0.0, 0.0)
    # The same of gaps in the probability of no speech.
    no_speech: tuple[Finite, SpreadOrNone] = (0.0, 0.0)
    # The same of gaps in the language's probability.
    language: tuple[Finite, SpreadOrNone] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class ShadowConfig:
    """The shadow monitor: a reference answers some requests again, to be compared."""

    # Share of answered requests that the reference answers again; 0: none.
    share: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    # Folder of the reference's engine, opened beside the product's; empty: the product's own.
    engine: NameOrNone = ""
    # Beam of the reference's requests; 0: as they came.
    beam_size: Annotated[int, Field(ge=0, le=MAX_BEAMS)] = 0
    # Device of the reference's engine.
    device: Device = "cpu"
    # Names of the keys that may read the texts that differ most.
    readers: tuple[Name, ...] = ()
    baseline: ShadowBaseline = ShadowBaseline()

    @property
    def opens_engine(self) -> bool:
        """Tell whether an engine is opened beside the product's."""
        return bool(self.share and self.engine)
