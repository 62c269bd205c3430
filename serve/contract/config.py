"""The configuration: frozen dataclasses that are read from a TOML file, with serve's defaults.

Each section of the file is a dataclass, here or in `serve/contract/server_config.py`, and each key
is a field. `build/config.py` and `eval/config.py` have their own sections. Command lines take
their defaults from these fields. The comments above the fields become docs/config.md.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from serve.contract.codec import flat, from_table, read_toml
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
from serve.contract.messages import Request, SearchOptions, SpeechOptions
from serve.contract.options import options_of
from serve.contract.runtimes import RuntimeSections
from serve.contract.server_config import (
    GatewayConfig,
    JobsConfig,
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

OTHER_SECTIONS = ("build", "eval")
"""Sections that serve ignores; build and eval read them."""


@dataclasses.dataclass(frozen=True)
class RuntimeConfig(RuntimeSections):
    """Keys of the runtime; keys of a single runtime have their own section."""

    # `cpu`, `cuda` or `cuda:N`; with several devices, such as `cuda:0,1`, `cuda:*` or `cpu,cpu`, a
    # server runs an engine on each, and the numbers below are for each engine.
    device: Device = "cpu"
    # Maximum number of windows that decode concurrently.
    slots: Count = 8
    # Maximum number of sequences that decode concurrently: one for a greedy window, five for a
    # beam of 5; 0: one for each slot.
    rows: CountOrNone = 0
    # Tokens that the engine's draft decoder proposes per step; 0: no speculative decoding.
    draft_tokens: Annotated[int, Field(ge=0, le=16)] = 0
    # Maximum number of windows in an encoder batch.
    encoder_batch: Count = 4
    # CPU threads that compute; 0: one for each core, shared equally by several engines.
    threads: CountOrNone = 0
    # "triton" on CUDA, "onednn" on a CPU; "torch": plain PyTorch, for tests and the bench.
    kernels: Kernels = "auto"
    # Precision of matrix products on a CPU; `auto`: bfloat16 if the CPU has AMX-BF16 or
    # AVX512-BF16, else float32. On the LLM API of a GPU, `auto` is bfloat16.
    compute_type: ComputeType = "auto"
    # Replay CUDA graphs; needs a CUDA device.
    cuda_graph: bool = False
    # Fraction of a GPU's memory that the engine may use.
    memory_share: Share = 0.9
    # Precision of the cross-attention cache; `int8` halves its memory.
    cross_kv: CrossPrecision = "full"
    # `fp8` needs Hopper or later; `auto`: FP8 if the engine's manifest proves that it changes no
    # more of the text than INT8 weights do.
    encoder_precision: EncoderPrecision = "full"


@dataclasses.dataclass(frozen=True)
class TranscriberConfig:
    """Limits and defaults of requests, and the thresholds of temperature fallback."""

    # Maximum length of a request's audio, in seconds.
    max_audio_s: Seconds = 3600.0
    # Maximum number of accepted requests that are not answered yet.
    max_pending: Count = 256
    # Threads that decode audio files.
    decode_workers: Count = 2
    # Seconds after which a request ends with an error.
    request_timeout_s: Seconds = 600.0
    # Maximum number of new tokens per window.
    max_tokens: Count = 224
    # Languages to detect if a request names none; empty: all languages of the engine.
    languages: tuple[Name, ...] = ()
    # Whether requests may ask for translation to English; false for a checkpoint without it.
    translate: bool = True
    # Maximum number of prompt tokens before a window; a checkpoint that was trained with fewer may
    # stop early if it gets more.
    previous_tokens: Annotated[int, Field(ge=1, le=223)] = 223
    # Whether earlier text in a prompt keeps its timestamps, as in OpenAI's code.
    previous_timestamps: bool = True
    # Names and terms to boost if a request has none, such as `Karenina^2` with a weight.
    phrases: tuple[Name, ...] = ()
    # Default beam size, and number of samples at temperatures above 0; 1: greedy.
    beam_size: Beams = SearchOptions.beam_size
    # Temperatures to try for a window until its text passes the thresholds.
    temperatures: Temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    # A text with a higher compression ratio is repetitive and is decoded again.
    compression_ratio_threshold: Finite = 2.4
    # A text with a lower mean log-probability is decoded again.
    logprob_threshold: Finite = -1.0
    # A text that fails a threshold counts as silence if its probability of no speech is higher.
    no_speech_threshold: Finite = 0.6
    # `on`: decode only speech; `off`: decode all audio; `auto`: only speech in audio of more than
    # 30 s, and nothing without speech.
    vad: VoiceActivity = "auto"
    # `on`: encode a short window and a second of silence; `off`: 30 s; `auto`: 10, 15 or 20 s for
    # windows of 3 to 19 s.
    short_encoder: ShortEncoder = "auto"


OPTIONS = options_of(Request, SearchOptions, SpeechOptions)
"""All options of a request, by name."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sections of a product's configuration that serve reads."""

    # Name of the product, which clients may send as the model; default: the file's name.
    name: Name = "demo"
    # Folder of the engine.
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
    """Read the sections of serve from a TOML file; see `read_config`."""
    return read_config(path, Config)


C = TypeVar("C", bound=Config)


def read_config(path: str | Path, kind: type[C]) -> C:
    """Read a product's TOML file; the default name is that of the file.

    Args:
        path: the file.
        kind: `Config`, or a subclass with the sections of build or eval. Sections of build and
            eval that `kind` lacks are ignored.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the file is not TOML, or a key or value is wrong.
    """
    path = Path(path)
    table = read_toml(path)
    keys = flat(table)
    for key, advice in flat(read_toml(REMOVED)).items():
        if key in keys:
            raise ConfigError(f"{path}: {key} was removed; it {advice}")
    names = {field.name for field in dataclasses.fields(kind)}
    table = {key: table[key] for key in table if key in names or key not in OTHER_SECTIONS}
    config = from_table(kind, {"name": path.stem, **table}, str(path))
    for problem in (*_server_problems(config), *_shadow_problems(config)):
        raise ConfigError(f"{path}: {problem}")
    return config


def table_of(config: Config) -> dict[str, Any]:
    """Return serve's sections of a config as a TOML table."""
    table = dataclasses.asdict(config)
    for section in OTHER_SECTIONS:
        table.pop(section, None)
    del table["runtime"]["kernels"]  # only tests and the bench set it; a file may not
    return table


def _server_problems(config: Config) -> Iterator[str]:
    """Yield contradictions between the keys of the server, the gateway and jobs."""
    server, processes, jobs = config.server, config.gateway.processes, config.jobs
    ports = (server.http_port, server.grpc_port, server.metrics_port)
    if len(set(ports)) != len(ports):
        yield f"server ports {ports} must be three different ports"
    if bool(server.tls_certificate) != bool(server.tls_key):
        yield (
            "only one of server.tls_certificate and server.tls_key is set; expected both or neither"
        )
    if server.max_request_mb * processes > server.max_inflight_mb:
        shared = "" if processes == 1 else f", shared by gateway.processes = {processes}"
        yield (
            f"server.max_request_mb = {server.max_request_mb} is more than "
            f"server.max_inflight_mb = {server.max_inflight_mb}{shared}; expected at most as much"
        )
    set_keys = [key for key, value in vars(jobs).items() if value != getattr(JobsConfig, key)]
    if set_keys and not jobs.folder:
        yield (
            f"jobs.{', jobs.'.join(set_keys)} without jobs.folder, which enables jobs; expected a "
            'folder such as folder = "jobs"'
        )


def _shadow_problems(config: Config) -> Iterator[str]:
    """Yield contradictions between the keys of the shadow monitor, if it is on."""
    shadow, processes = config.shadow, config.gateway.processes
    if shadow.share and not (shadow.engine or shadow.beam_size):
        yield (
            f"shadow.share = {shadow.share:g}, but there is no reference; expected shadow.engine "
            "or shadow.beam_size"
        )
    if shadow.share and ("*" in shadow.device or "," in shadow.device):
        yield f"shadow.device = {shadow.device!r}; expected one device, such as cpu or cuda:0"
    if shadow.share and processes > 1:
        yield (
            f"shadow.share = {shadow.share:g} and gateway.processes = {processes}; expected "
            "processes = 1, because a process cannot see whether the others are idle"
        )
