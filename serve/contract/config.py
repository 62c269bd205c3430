"""Configuration: frozen dataclasses read from one TOML file. The only home of serve's defaults.

Each section of the file is one dataclass, below or in `serve/contract/server_config.py`, and each
key one field; `build/config.py` and `eval/config.py` hold the sections of their own. Command lines
read their defaults from these fields.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from serve.contract.codec import from_table, read_toml
from serve.contract.errors import ConfigError
from serve.contract.fields import (
    Beams,
    Count,
    CountOrNone,
    Device,
    Factor,
    Finite,
    Fraction,
    Moment,
    Name,
    Power,
    Seconds,
    SecondsOrNone,
    Share,
    ShortEncoder,
    Temperatures,
    VoiceActivity,
)
from serve.contract.jobs_config import JobsConfig
from serve.contract.messages import Mode, Request
from serve.contract.options import option, options_of
from serve.contract.runtimes import REMOVED_KEYS, RuntimeSections
from serve.contract.server_config import (
    GatewayConfig,
    LiveConfig,
    ServerConfig,
    ShadowConfig,
    TracesConfig,
)

Precision = Literal["int8", "fp16"]
KernelsName = Literal["torch", "triton", "onednn"]
Kernels = Literal["auto", KernelsName]
ComputeType = Literal["auto", "float32", "bfloat16"]
CrossPrecision = Literal["full", "int8"]
EncoderPrecision = Literal["auto", "full", "fp8"]

SECTIONS_OF_OTHERS = ("build", "eval")
"""Sections that serve passes over: those wings read them."""

_REMOVED = {
    "upstreams": "named other Earshots that requests were passed on to; put a load balancer before "
    "servers of the same model, and let clients address others by their own urls",
    "shadow.model": "named another Earshot's model as the reference; name the folder of its engine "
    "in shadow.engine",
    "gateway.price_per_audio_hour": "was the price that /v1/usage told; multiply its audio_seconds "
    "by your price",
    "gateway.currency": "was the currency of the price that /v1/usage told; leave it out",
    "jobs.store": "was an object store for the audio of jobs; servers that share jobs.database now "
    "share jobs.folder by a network file system",
}
"""Keys that were removed: what each did, and what to do now."""


@dataclasses.dataclass(frozen=True)
class RuntimeConfig(RuntimeSections):
    """Keys of how an engine is executed. What one runtime alone knows has a section of its own."""

    # "cpu", "cuda" or "cuda:N". Several, "cuda:0,1", "cuda:*" or "cpu,cpu", are for servers, which
    # have an engine on each; the numbers below are of each. See serve/contract/devices.py.
    device: Device = "cpu"
    slots: Count = 8  # windows that decode at the same time
    # Sequences that decode at the same time, of all windows together: a greedy window takes one, a
    # beam of 5 takes five. 0 = one for each slot, so no beams.
    rows: CountOrNone = 0
    # Most tokens that the engine's draft, if it holds one, guesses at a time; 0 = none. Without
    # CUDA graphs it is left alone where guessing measures slower than decoding without.
    draft_tokens: Annotated[int, Field(ge=0, le=16)] = 0
    encoder_batch: Count = 4  # most windows encoded in one go
    threads: CountOrNone = 0  # CPU threads for compute; 0 = every core, or its share of several
    kernels: Kernels = "auto"  # "triton" on CUDA, "onednn" on a CPU; "torch": plain, for comparison
    # Of a CPU's products; sums stay float32. "auto": bfloat16 where the processor multiplies it
    # (AMX-BF16, AVX512-BF16). A GPU computes in float16.
    compute_type: ComputeType = "auto"
    cuda_graph: bool = False  # replay CUDA graphs: needs a CUDA device with triton kernels
    memory_share: Share = 0.9  # of a GPU's memory that may be taken
    cross_kv: CrossPrecision = "full"  # keys and values of cross-attention; "int8": half the memory
    # Of the encoder's products; "fp8" needs Hopper or later. "auto": FP8 where the device has it
    # and the engine's manifest proves that it changes no more of the text than INT8 weights do.
    encoder_precision: EncoderPrecision = "full"
    # On a GPU: windows that have decoded for longer go first, while fewer wait than decode.
    decode_target_s: SecondsOrNone = 0.005
    steps_per_sync: Count = 4  # with cuda_graph: decoder steps between two looks at what has ended


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Options of the search for a window's best text, where a request does not say them itself.

    The keys stand in [transcriber]; they mean what faster-whisper's options of these names mean.
    """

    beam_size: Beams = option(1, "1 to 8 hypotheses, at temperature 0; 1: greedy")
    patience: Factor = option(  # rounded
        1.0,
        "the search ends with BEAM_SIZE * PATIENCE of them",
    )
    length_penalty: Power = option(1.0, "they rank by log-probability / length ** this")
    best_of: Beams = option(1, "1 to 8 samples, at temperatures above 0")  # the best is the answer
    repetition_penalty: Factor = option(1.0, "above 1: said tokens become less likely")
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=448)] = option(  # 448 is the context
        0,
        "never so many tokens twice in a row",
    )
    suppress_blank: bool = option(True, "a window's text begins with no space, and is not empty")


SEARCH_OPTIONS = tuple(field.name for field in dataclasses.fields(SearchConfig))
"""The options of a request that are `SearchConfig`'s fields."""


@dataclasses.dataclass(frozen=True)
class SpeechConfig:
    """Bounds of what counts as speech, where a request sets none; keys of [transcriber].

    The values are those with which faster-whisper packs windows for a batch, but for the shortest
    speech, which it leaves at 0. In the recordings of `python -m eval long` 0.1 s keeps out 13 of
    23 moments in which nobody speaks, and 30 ms of 39 minutes in which somebody does.
    """

    vad_threshold: Fraction = option(0.5, "0 to 1; a frame that is likelier begins speech")
    vad_min_speech_s: Moment = option(0.1, "seconds; what is no longer is no speech")
    vad_min_silence_s: Moment = option(0.16, "seconds of silence that end speech")
    vad_pad_s: Moment = option(0.4, "seconds that stay on either side of speech")


SPEECH_OPTIONS = tuple(field.name for field in dataclasses.fields(SpeechConfig))
"""The options of a request that are `SpeechConfig`'s fields."""


@dataclasses.dataclass(frozen=True)
class TranscriberConfig(SearchConfig, SpeechConfig):
    """Bounds of what requests may ask for, and of when a window is decoded again."""

    max_audio_s: Seconds = 3600.0
    max_audio_mb: Count = 768  # MiB of a file, or of samples, as sent
    # Millions of samples, of all channels, that a request's audio may unpack to. An hour of 192 kHz
    # stereo has 1382.
    max_decoded_msamples: Count = 1500
    # Seconds of processor time for decoding a request's audio; finding speech in it is apart.
    max_decode_s: Seconds = 60.0
    # Whether what is there of a file that was cut short is transcribed, with a warning, where a
    # request does not say it; else it is refused.
    partial: bool = False
    max_pending: Count = 256  # requests accepted and not yet answered; more are refused
    max_pending_mb: Count = 1024  # MiB of their audio that is not yet decoded; more is refused
    decode_workers: Count = 2  # threads that turn bytes into samples
    request_timeout_s: Seconds = 600.0  # a request that takes longer ends with an error
    max_tokens: Count = 224  # new tokens per window
    # Codes of the languages that audio may be in, where a request names none: detection chooses
    # among them. (): among all that the engine knows.
    languages: tuple[Name, ...] = ()
    # While the languages that were tried are together less likely than this, a window is decoded
    # in the next one, too, and the likeliest text is taken; 0: the likeliest language is.
    language_certainty: Annotated[Finite, Field(ge=0, le=1)] = 0.85
    language_tries: Annotated[int, Field(ge=1, le=5)] = 2  # the most languages of a window
    # Where a request names no language, one is found for all windows; a later one that is at least
    # so likely in another language is decoded in that, too; the likelier text is taken. 0: none.
    language_switch: Annotated[Finite, Field(ge=0, le=1)] = 0.5
    # Whether requests may ask for English. Some checkpoints have the token, but never learnt it.
    translate: bool = True
    # Where a request does not say it: "parallel", its windows are decoded at the same time;
    # "sequential", one after another, each with the text of those before it as its prompt.
    mode: Mode = "parallel"
    # Most tokens of text before a window: hotwords, the client's prompt and, in sequence, what was
    # said. A network that was trained with less may stop early where it gets more.
    previous_tokens: Annotated[int, Field(ge=1, le=223)] = 223
    previous_timestamps: bool = True  # what was said keeps its timestamps there, as OpenAI's does
    # Names and terms that are to come out right, where a request names none: "Anna Karenina", or
    # with a weight "Anna Karenina^2".
    phrases: tuple[Name, ...] = ()
    temperatures: Temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: Finite = 2.4  # above: the text repeats itself, decode again
    logprob_threshold: Finite = -1.0  # below: the model is unsure, decode again
    no_speech_threshold: Finite = 0.6  # above, and unsure: silence, no text
    # Segments of unlikely words between silences that are longer, in seconds, are left out, where a
    # request does not say it; 0 = none are. Words are timed for it.
    hallucination_silence_threshold: SecondsOrNone = 0.0
    # Whether what is not speech is left out before decoding, where a request does not say it: "on";
    # "off"; "auto", in audio that is longer than a window of 30 s. With "auto" audio in which
    # nobody speaks is left out whole, however short it is.
    vad: VoiceActivity = "auto"
    # Whether the encoder sees a short window and silence up to 30 s, or less of it, where a request
    # does not say it. "on": the window and a second, whatever that costs in errors. "auto": of
    # windows of 3 to 19 s, up to 10, 15 or 20 s; whose text is doubted is heard again as a whole.
    # Measured with base. A runtime that encodes whole windows alone does so.
    short_encoder: ShortEncoder = "auto"


OPTIONS = options_of(Request, TranscriberConfig)
"""All options of a request, by their names."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One product, as far as serve knows it: what to run and how to serve it."""

    name: Name = "demo"
    engine: Name = "engines/demo"  # the folder that build writes and serve opens
    runtime: RuntimeConfig = RuntimeConfig()
    transcriber: TranscriberConfig = TranscriberConfig()
    server: ServerConfig = ServerConfig()
    gateway: GatewayConfig = GatewayConfig()
    live: LiveConfig = LiveConfig()
    traces: TracesConfig = TracesConfig()
    jobs: JobsConfig = JobsConfig()
    shadow: ShadowConfig = ShadowConfig()


def load_config(path: str | Path) -> Config:
    """Read what serve knows of a product from its TOML file; see `read_config`."""
    return read_config(path, Config)


C = TypeVar("C", bound=Config)


def read_config(path: str | Path, kind: type[C]) -> C:
    """Read a product's TOML file; the product is named after it where it gives no name.

    Args:
        path: of the file.
        kind: `Config`, or what another wing adds its sections to. Sections of wings that `kind`
            does not have are passed over.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is not TOML, or a key or value is wrong.
    """
    path = Path(path)
    table = read_toml(path)
    build = table.get("build")
    if isinstance(build, dict) and "engine" in build:
        raise ConfigError(
            f"{path}: [build] engine has moved; write engine = {build['engine']!r} at the top of "
            "the file, above its first section"
        )
    _refuse_removed(table, path)
    known = {field.name for field in dataclasses.fields(kind)}
    own = {key: table[key] for key in table if key in known or key not in SECTIONS_OF_OTHERS}
    config = from_table(kind, {"name": path.stem, **own}, str(path))
    _check_server(config.server, path)
    _check_shares(config, path)
    _check_jobs(config.jobs, path)
    _check_shadow(config, path)
    return config


def _refuse_removed(table: Mapping[str, Any], path: Path) -> None:
    for place, advice in (_REMOVED | REMOVED_KEYS).items():
        *parents, key = place.split(".")
        section: Any = table
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section:
            raise ConfigError(f"{path}: {place} was removed; it {advice}")


def _check_server(server: ServerConfig, path: Path) -> None:
    ports = (server.http_port, server.grpc_port, server.metrics_port)
    if len(set(ports)) != len(ports):
        raise ConfigError(f"{path}: server ports {ports} must be three different ports")
    if bool(server.tls_certificate) != bool(server.tls_key):
        raise ConfigError(
            f"{path}: server.tls_certificate and server.tls_key belong together; expected both, or "
            "neither"
        )


def _check_jobs(jobs: JobsConfig, path: Path) -> None:
    set_keys = [key for key, value in vars(jobs).items() if value != getattr(JobsConfig, key)]
    if set_keys and not jobs.folder:
        raise ConfigError(
            f"{path}: jobs.{', jobs.'.join(set_keys)}, and no jobs.folder, without which there are "
            'no jobs; expected folder = "jobs" or the like beside them'
        )


def _check_shares(config: Config, path: Path) -> None:
    server, processes = config.server, config.gateway.processes
    if server.max_request_mb * processes > server.max_inflight_mb:
        share = "" if processes == 1 else f", shared by gateway.processes = {processes}"
        raise ConfigError(
            f"{path}: server.max_request_mb = {server.max_request_mb} is more than "
            f"server.max_inflight_mb = {server.max_inflight_mb}{share}; expected at most as much"
        )


def _check_shadow(config: Config, path: Path) -> None:
    shadow, problem = config.shadow, ""
    if not shadow.share:
        return
    if not (shadow.engine or shadow.beam_size):
        problem = (
            f"shadow.share = {shadow.share:g}, but there is no reference; expected shadow.engine "
            "or shadow.beam_size"
        )
    elif shadow.device.endswith("*") or "," in shadow.device:
        problem = f"shadow.device = {shadow.device!r}; expected one device, such as cpu or cuda:0"
    elif config.gateway.processes > 1:
        problem = (
            f"shadow.share = {shadow.share:g} and gateway.processes = {config.gateway.processes}; "
            "expected one process, for each sees only its own requests and so not when all is idle"
        )
    if problem:
        raise ConfigError(f"{path}: {problem}")
