"""Configuration: frozen dataclasses read from one TOML file. The only home of defaults.

Each section of the file is one dataclass below and each key one field; an unknown key is an error
that names it and its nearest neighbour. Command lines read their defaults from these fields.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from serve.errors import ConfigError

RuntimeName = Literal["native", "tensorrt_llm", "tensorrt_llm_api"]
Precision = Literal["int8", "fp16"]
Kernels = Literal["auto", "torch", "triton"]
CrossPrecision = Literal["full", "int8"]
EncoderPrecision = Literal["full", "fp8"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """How a checkpoint becomes an engine."""

    checkpoint: str = "build/demo/checkpoint"  # Hugging Face folder or hub id, or OpenAI .pt
    engine: str = "engines/demo"  # the folder that is written
    precision: Precision = "int8"
    runtime: RuntimeName = "native"  # tensorrt_llm: of release 1.2; tensorrt_llm_api: 1.3 or later
    tokenizer: str = ""  # folder or hub id with tokenizer.json; needed for .pt only


@dataclasses.dataclass(frozen=True)
class TrtllmConfig:
    """What only TensorRT-LLM knows. Engines are built for `beam_width`; the rest is for serving.

    The LLM API has the first three; the rest is for engines.
    """

    beam_width: int = 1  # more than 1: beam search for greedy jobs, and no streaming
    kv_cache_fraction: float = 0.85  # of the GPU memory left once the engines are loaded
    cross_kv_fraction: float = 0.75  # of that, for the encoder's output: 1500 / (1500 + 448)
    logits_processor: bool = True  # Whisper's rules by a callback on every step; else by a bias
    no_speech_probe: bool = False  # a second encoder pass per window for no-speech probability
    triton_backend: bool = False  # serve by Triton's C++ model; without timestamps, see README


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """How the runtime executes an engine."""

    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    slots: int = 8  # windows that decode at the same time
    encoder_batch: int = 4  # most windows encoded in one go
    threads: int = 0  # CPU threads for compute; 0 = every core
    kernels: Kernels = "auto"  # "triton" where the device is CUDA, else "torch"
    cuda_graph: bool = False  # replay CUDA graphs: needs a CUDA device with triton kernels
    memory_share: float = 0.9  # of a GPU's memory that may be taken
    cross_kv: CrossPrecision = "full"  # keys and values of cross-attention; "int8": half the memory
    encoder_precision: EncoderPrecision = "full"  # "fp8": its products, on Hopper and later
    decode_target_s: float = 0.05  # windows decoding for longer go before less than a full batch
    steps_per_sync: int = 4  # with cuda_graph: decoder steps between two looks at what has ended
    tensorrt_llm: TrtllmConfig = TrtllmConfig()


@dataclasses.dataclass(frozen=True)
class TranscriberConfig:
    """What requests may ask for, and when a window is decoded again."""

    max_audio_s: float = 3600.0
    max_pending: int = 256  # requests accepted and not yet answered; more are refused
    decode_workers: int = 2  # threads that turn bytes into samples
    request_timeout_s: float = 600.0  # a request that takes longer ends with an error
    max_tokens: int = 224  # new tokens per window
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float = 2.4  # above: the text repeats itself, decode again
    logprob_threshold: float = -1.0  # below: the model is unsure, decode again
    no_speech_threshold: float = 0.6  # above, and unsure: silence, no text


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Where Triton Inference Server listens and how long things may take."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    start_timeout_s: float = 180.0
    drain_timeout_s: float = 30.0


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Which clips and which systems an evaluation compares."""

    manifest: str = "tests/data/manifest.jsonl"
    systems: tuple[str, ...] = (
        "earshot-triton",
        "earshot-int8",
        "earshot-fp16",
        "transformers-fp32",
        "faster-whisper-int8",
        "faster-whisper-float32",
    )
    concurrency: int = 8
    repeats: int = 3  # timed passes over the clips, after one warm-up pass
    threads: int = 2  # CPU threads given to every system
    max_cer_gap_faster_whisper: float = 0.3  # points; more fails the run
    max_cer_gap_fp16: float = 0.2  # points; more fails the run


@dataclasses.dataclass(frozen=True)
class Config:
    """One product: what to build, how to run and serve it, how to judge it."""

    name: str = "demo"
    build: BuildConfig = BuildConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    transcriber: TranscriberConfig = TranscriberConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()


def load_config(path: str | Path) -> Config:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is wrong.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    config = _from_table(Config, {"name": path.stem, **table}, str(path))
    _check(config, str(path))
    return config


def _from_table(cls: type[T], table: dict[str, Any], where: str) -> T:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(hints)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        values[key] = _convert(hints[key], value, f"{where}: {key}")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check one TOML value against a field's type; nested tables become dataclasses."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return _from_table(typing.cast(type[Any], hint), value, where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"{where} = {value!r}; expected one of {', '.join(choices)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        return tuple(_convert(typing.get_args(hint)[0], item, where) for item in value)
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"config fields hold one type; {where} is declared {hint}")
    return _scalar(hint, value, where)


def _scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} = {value!r}; expected {hint.__name__}")
    return value


def _check(config: Config, where: str) -> None:
    """Reject values that no later stage could honour."""
    positive = {
        "runtime.slots": config.runtime.slots,
        "runtime.encoder_batch": config.runtime.encoder_batch,
        "runtime.steps_per_sync": config.runtime.steps_per_sync,
        "transcriber.max_audio_s": config.transcriber.max_audio_s,
        "transcriber.max_pending": config.transcriber.max_pending,
        "transcriber.decode_workers": config.transcriber.decode_workers,
        "transcriber.request_timeout_s": config.transcriber.request_timeout_s,
        "transcriber.max_tokens": config.transcriber.max_tokens,
        "server.start_timeout_s": config.server.start_timeout_s,
        "eval.concurrency": config.eval.concurrency,
        "eval.repeats": config.eval.repeats,
    }
    for key, value in positive.items():
        if value <= 0:
            raise ConfigError(f"{where}: {key} = {value}; expected more than 0")
    if not 0.0 < config.runtime.memory_share <= 1.0:
        raise ConfigError(
            f"{where}: runtime.memory_share = {config.runtime.memory_share}; expected above 0, to 1"
        )
    _check_trtllm(config.runtime, where)
    temperatures = config.transcriber.temperatures
    if not temperatures or any(not 0.0 <= t <= 1.0 for t in temperatures):
        raise ConfigError(
            f"{where}: transcriber.temperatures = {list(temperatures)}; "
            "expected at least one value, each from 0 to 1"
        )
    ports = (config.server.http_port, config.server.grpc_port, config.server.metrics_port)
    if len(set(ports)) != 3 or any(not 0 < port < 65536 for port in ports):
        raise ConfigError(f"{where}: server ports {ports} must be three different ports")


def _check_trtllm(config: RuntimeConfig, where: str) -> None:
    trtllm = config.tensorrt_llm
    if trtllm.beam_width < 1:
        raise ConfigError(
            f"{where}: runtime.tensorrt_llm.beam_width = {trtllm.beam_width}; expected at least 1"
        )
    for key in ("kv_cache_fraction", "cross_kv_fraction"):
        value = getattr(trtllm, key)
        if not 0.0 < value < 1.0:
            raise ConfigError(
                f"{where}: runtime.tensorrt_llm.{key} = {value}; expected between 0 and 1"
            )
