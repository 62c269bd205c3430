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
    Finite,
    Name,
    Seconds,
    Share,
    ShortEncoder,
    Temperatures,
    VoiceActivity,
)
from serve.contract.jobs_config import JobsConfig
from serve.contract.messages import (
    Request,
    SearchOptions,
    SpeechOptions,
)
from serve.contract.options import options_of
from serve.contract.runtimes import RuntimeSections
from serve.contract.server_config import (
    GatewayConfig,
    LiveConfig,
    ServerConfig,
    ShadowConfig,
)

Precision = Literal["int8", "fp16"]
KernelsName = Literal["torch", "triton", "onednn"]
Kernels = Literal["auto", KernelsName]
ComputeType = Literal["auto", "float32", "bfloat16"]
CrossPrecision = Literal["full", "int8"]
EncoderPrecision = Literal["auto", "full", "fp8"]

SECTIONS_OF_OTHERS = ("build", "eval")
"""Sections that serve passes over: those wings read them."""


@dataclasses.dataclass(frozen=True)
class RuntimeConfig(RuntimeSections):
    """Keys of how an engine is executed. What one runtime alone knows has a section of its own."""

    # `cpu`, `cuda` or `cuda:N`; a server has an engine on each of several, as `cuda:0,1`, `cuda:*`
    # or `cpu,cpu`, and the numbers below hold for each.
    device: Device = "cpu"
    # Windows that decode at the same time.
    slots: Count = 8
    # Sequences that decode at the same time: one for a greedy window, five for a beam of 5; 0: one
    # for each slot.
    rows: CountOrNone = 0
    # Tokens that the engine's draft guesses at a time; 0: none.
    draft_tokens: Annotated[int, Field(ge=0, le=16)] = 0
    # Windows that are encoded in one batch at most.
    encoder_batch: Count = 4
    # CPU threads that compute; 0: one for each core, shared equally by several engines.
    threads: CountOrNone = 0
    # "triton" on CUDA, "onednn" on a CPU; "torch": plain, for tests and the bench.
    kernels: Kernels = "auto"
    # Precision of a CPU's products; `auto`: bfloat16 where the processor multiplies it (AMX-BF16,
    # AVX512-BF16), else float32.
    compute_type: ComputeType = "auto"
    # Replay CUDA graphs; needs a CUDA device.
    cuda_graph: bool = False
    # Share of a GPU's memory that the engine may take.
    memory_share: Share = 0.9
    # Precision of the cross-attention cache; `int8` takes half the memory.
    cross_kv: CrossPrecision = "full"
    # `fp8` needs Hopper or later; `auto`: FP8 where the engine's manifest proves that it changes no
    # more of the text than INT8 weights do.
    encoder_precision: EncoderPrecision = "full"


@dataclasses.dataclass(frozen=True)
class TranscriberConfig:
    """Bounds of what requests may ask for, and of when a window is decoded again."""

    # Seconds of audio of a request at most.
    max_audio_s: Seconds = 3600.0
    # Requests that are accepted and not yet answered, at most.
    max_pending: Count = 256
    # Threads that decode audio files.
    decode_workers: Count = 2
    # Seconds after which a request ends with an error.
    request_timeout_s: Seconds = 600.0
    # New tokens of a window at most.
    max_tokens: Count = 224
    # Languages that are detected where a request names none; empty: all that the engine knows.
    languages: tuple[Name, ...] = ()
    # Whether requests may ask for English; false for a checkpoint that never learnt it.
    translate: bool = True
    # Tokens of text before a window at most; a checkpoint that was trained with less may stop early
    # where it gets more.
    previous_tokens: Annotated[int, Field(ge=1, le=223)] = 223
    # Whether earlier text keeps its timestamps in a prompt, as OpenAI's does.
    previous_timestamps: bool = True
    # Names and terms that are to come out right where a request names none, as `Karenina^2` with a
    # weight.
    phrases: tuple[Name, ...] = ()
    # Hypotheses of a search, and samples at temperatures above 0, where a request does not say; 1:
    # greedy.
    beam_size: Beams = SearchOptions.beam_size
    # Temperatures at which a window is tried until one gives text that is trusted.
    temperatures: Temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    # A text that compresses better repeats itself and is decoded again.
    compression_ratio_threshold: Finite = 2.4
    # A text whose mean log-probability is lower is decoded again.
    logprob_threshold: Finite = -1.0
    # A doubted text is left out as silence where the probability of no speech is higher.
    no_speech_threshold: Finite = 0.6
    # `on`: decode speech alone; `off`: decode all; `auto`: speech alone in audio of more than 30 s,
    # and nothing where nobody speaks.
    vad: VoiceActivity = "auto"
    # `on`: encode a short window and a second of silence; `off`: 30 s; `auto`: 10, 15 or 20 s for
    # windows of 3 to 19 s.
    short_encoder: ShortEncoder = "auto"


OPTIONS = options_of(Request, SearchOptions, SpeechOptions)
"""All options of a request, by their names."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One product, as far as serve knows it: what to run and how to serve it."""

    # Name of the product, by which clients may ask for its model; default: the file's name.
    name: Name = "demo"
    # Folder of the engine, which build writes and serve opens.
    engine: Name = "engines/demo"
    runtime: RuntimeConfig = RuntimeConfig()
    transcriber: TranscriberConfig = TranscriberConfig()
    server: ServerConfig = ServerConfig()
    gateway: GatewayConfig = GatewayConfig()
    live: LiveConfig = LiveConfig()
    jobs: JobsConfig = JobsConfig()
    shadow: ShadowConfig = ShadowConfig()


REMOVED = Path(__file__).with_name("removed_keys.toml")


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
    _refuse_removed(table, read_toml(REMOVED), path)
    known = {field.name for field in dataclasses.fields(kind)}
    own = {key: table[key] for key in table if key in known or key not in SECTIONS_OF_OTHERS}
    config = from_table(kind, {"name": path.stem, **own}, str(path))
    _check_server(config.server, path)
    _check_shares(config, path)
    _check_jobs(config.jobs, path)
    _check_shadow(config, path)
    return config


def table_of(config: Config) -> dict[str, Any]:
    """Return a config as the table of a file, without fields that no file may set."""
    return _kept(dataclasses.asdict(config), read_toml(REMOVED))


def _kept(table: Mapping[str, Any], removed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _kept(value, removed.get(key, {})) if isinstance(value, dict) else value
        for key, value in table.items()
        if not isinstance(removed.get(key), str)
    }


def _refuse_removed(
    table: Mapping[str, Any], removed: Mapping[str, Any], path: Path, parents: str = ""
) -> None:
    for key, advice in removed.items():
        place, value = f"{parents}{key}", table.get(key)
        if isinstance(advice, str) and value is not None:
            raise ConfigError(f"{path}: {place} was removed; it {advice}")
        if isinstance(advice, dict) and isinstance(value, dict):
            _refuse_removed(value, advice, path, f"{place}.")


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
