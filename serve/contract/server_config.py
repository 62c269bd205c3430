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
    CountOrNone,
    Device,
    Finite,
    Host,
    HttpUrlOrNone,
    Name,
    NameOrNone,
    Origin,
    Port,
    Seconds,
    SecondsOrNone,
    Share,
    ShortEncoder,
)

SpreadOrNone = Annotated[Finite, Field(ge=0)]
LogKind = Literal["text", "json", "off"]
UnknownFields = Literal["refuse", "ignore"]


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The gateway's addresses, what it lets in, and how long things may take."""

    host: Address = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002
    # A file of API keys (see serve/contract/keys.py), read again when it changes; relative to where
    # the server is started. Where there is none, and none in the environment, everybody may come
    # in: if `host` is not of this machine alone, the server does not start unless `open` says so.
    keys_file: NameOrNone = ""
    open: bool = False
    # Where what keys have had is counted, by day (see serve/gateway/usage.py). Where none is named
    # it is forgotten when the server stops.
    usage_file: NameOrNone = ""
    # Pages of other hosts that browsers may let in, such as "https://example.org". Requests of
    # other pages are refused, those of programs that are no browsers are not.
    allowed_origins: tuple[Origin, ...] = ()
    # Names by which clients may call it besides localhost and addresses of loopback, such as that
    # of a proxy before it. Where `host` is of this machine alone, or names stand here, requests
    # with another Host are refused.
    allowed_hosts: tuple[Host, ...] = ()
    tls_certificate: NameOrNone = ""  # PEM, the whole chain; with it HTTP and gRPC speak TLS
    tls_key: NameOrNone = ""  # PEM, without a password
    start_timeout_s: Seconds = 180.0
    drain_timeout_s: SecondsOrNone = 30.0
    max_request_mb: Count = 256  # MiB of one request; an hour of 16 kHz WAV is 110
    # MiB of all requests between their arrival and their answer. Each byte of them is there about
    # 6 times for a moment: in the gateway, Triton, shared memory, the model. So 1024 may want 6 GB
    # beside the engine; with 4 GB for everything, set 400: SECURITY.md, "Memory". Files of more
    # than 1 MiB in forms count once, and lie on disk.
    max_inflight_mb: Count = 1024
    max_inflight: Count = 1024  # requests between their arrival and their answer
    # Where there are several keys: the most that one of them may have of `max_inflight`,
    # `max_inflight_mb` and `live.max_streams`, unless its own limits in the file say more or less.
    key_share: Share = 0.5
    # What clients of OpenAI's API may write for `model` beside the product's own name; in patterns
    # * is any text. The defaults are what known clients send.
    model_aliases: tuple[Name, ...] = (
        "whisper-1",
        "gpt-*transcribe*",
        "gpt-*realtime*",
        "whisper-*",
        "*/*whisper-*",
    )
    upload_timeout_s: Seconds = 60.0  # a request that takes longer to arrive is given up
    stall_timeout_s: Seconds = 60.0  # a model's process silent for so long is started again
    # Engines that had no request for so long are unloaded; the next request loads them, and waits.
    # 0 = never.
    idle_unload_s: SecondsOrNone = 0.0
    # A manifest of clips, of which a new engine has to hear the first three before it takes another
    # one's place (`python -m serve reload`), and the most errors that it may make of 100 of their
    # characters, by their texts or, of a clip without one, by what the engine before it says.
    reload_clips: NameOrNone = ""
    reload_max_cer: Share = 0.25

    @property
    def on_loopback(self) -> bool:
        """Tell whether `host` is reached from this machine alone."""
        return ipaddress.IPv4Address(self.host).is_loopback


@dataclasses.dataclass(frozen=True)
class GatewayConfig:
    """The gateway's processes, and what they say of requests."""

    # That share the server's addresses, so that one that is busy, or ends, is not the server: the
    # system gives each connection to one of them. Each has its share, rounded up, of
    # `server.max_inflight`, `server.max_inflight_mb`, `live.max_streams` and of keys' limits.
    processes: Count = 1
    # Seconds within which 99 of 100 files are to be answered, once they are here; 0: any. What
    # could not be is refused at once, with the time at which it could. See docs/operating.md.
    target_p99_s: SecondsOrNone = 0.0
    # A line in the log for each request: words for people, JSON objects (all lines of the gateway
    # are, then), or none. See serve/gateway/observe/log.py.
    log: LogKind = "text"
    # Fields of forms that OpenAI's API and ours do not have: "ignore" names them in the answer's
    # header x-earshot-ignored.
    unknown_fields: UnknownFields = "ignore"


@dataclasses.dataclass(frozen=True)
class LiveConfig:
    """Keys of live text, and of what a stream may cost."""

    update_s: Seconds = 0.5  # between two decodings of an utterance that is not over
    # Of these decodings. Greedy, they take the one before as a draft; 0 = as in [transcriber].
    beam_size: Annotated[int, Field(ge=0, le=MAX_BEAMS)] = 1
    # How much of 30 s the encoder sees of an utterance; "auto": as in [transcriber], where it is
    # told. On a CPU it is most of the work.
    short_encoder: ShortEncoder = "auto"
    max_streams: Count = 64  # at a time; more are refused
    idle_timeout_s: Seconds = 300.0  # a stream that says nothing for so long is closed
    max_session_s: Seconds = 3600.0  # one that lasts longer as well

    @property
    def asks_short_encoder(self) -> bool | None:
        """What requests for live text ask for; None: as in [transcriber]."""
        return None if self.short_encoder == "auto" else self.short_encoder == "on"


@dataclasses.dataclass(frozen=True)
class TracesConfig:
    """Where the spans of requests are sent; by default nowhere, and there are none."""

    # Of an OpenTelemetry collector that takes OTLP over HTTP, without /v1/traces. Where none is
    # named, OTEL_EXPORTER_OTLP_ENDPOINT may name one.
    endpoint: HttpUrlOrNone = ""
    # Of the requests whose caller does not say by its `traceparent` whether they are recorded.
    sample_share: Annotated[Finite, Field(ge=0, le=1)] = 1.0


@dataclasses.dataclass(frozen=True)
class ShadowBaseline:
    """What gaps between the answers of a sound engine and its reference are like.

    Of each kind the mean and the standard deviation of its logarithm; see docs/operating.md, and
    serve/gateway/shadow/figures.py. `python -m serve shadow` tells them.
    A kind of (0, 0) is not known; where none is, no drift is told.
    """

    log_probability: tuple[Finite, SpreadOrNone] = (0.0, 0.0)
    no_speech: tuple[Finite, SpreadOrNone] = (0.0, 0.0)
    language: tuple[Finite, SpreadOrNone] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class ShadowConfig:
    """The shadow monitor: a reference answers some requests again, to be compared."""

    # Of the requests that OpenAI's API and KServe's have answered, streams and live text apart.
    # 0: none, and nothing is kept.
    share: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    # The reference: an engine's folder, which is opened beside the product's. Where none is named
    # it is the product itself, with another beam.
    engine: NameOrNone = ""
    beam_size: Annotated[int, Field(ge=0, le=MAX_BEAMS)] = 0  # of its requests; 0: as they came
    device: Device = "cpu"  # that `engine` runs on: one
    memory_share: Share = 0.2  # of a GPU's memory that it may take there
    idle_s: SecondsOrNone = 1.0  # so long must nothing be under way before it is asked
    # MiB of requests that wait for that, in memory or, if they were spooled, on disk; beyond that
    # the oldest are dropped.
    max_pending_mb: Count = 64
    worst: CountOrNone = 20  # texts of so many answers are kept: those that differ most
    # Names of the keys that may read these texts. Where the server has no keys, whoever reaches it
    # may, if `server.host` is of this machine alone.
    readers: tuple[Name, ...] = ()
    baseline: ShadowBaseline = ShadowBaseline()

    @property
    def opens_engine(self) -> bool:
        """Tell whether an engine is opened beside the product's."""
        return bool(self.share and self.engine)
