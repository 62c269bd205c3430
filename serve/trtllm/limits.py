"""Which TensorRT-LLM is here, what an engine was compiled for, and whether this machine can run it.

Nothing here imports `tensorrt_llm`, so every refusal comes in a moment and in plain words.
"""

import dataclasses
import importlib.metadata
import importlib.util
from pathlib import Path

import torch
from packaging.requirements import Requirement

from serve.codec import from_table
from serve.config import RuntimeConfig
from serve.engine import Engine
from serve.errors import ConfigError, EngineError, UnavailableError

ENGINES_FOLDER = "tensorrt_llm"  # in the engine folder; holds encoder/ and decoder/
CHECKPOINT_FOLDER = "checkpoint"  # in an engine for the LLM API: the Hugging Face folder
REBUILD = "build it again with `make build-engine CONFIG=…`"
RELEASE = (1, 2)  # the last that compiles engines; what the checkpoint's names are for
API_RELEASE = (1, 3)  # the first whose PyTorch backend runs Whisper
WHISPER_MODEL = "_torch/models/modeling_whisper.py"  # in the package; early 1.3 lacks it
_MEND = (
    "use the image of deploy/images/trtllm.Dockerfile, which has 1.2.1, or build with "
    "build.runtime = 'native'"
)
_MEND_API = "install a later TensorRT-LLM, or build with build.runtime = 'native'"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How many tokens a window's sequence may have."""

    max_prompt_tokens: int
    max_seq_len: int  # prompt and new tokens together


@dataclasses.dataclass(frozen=True)
class Limits(Lengths):
    """What the compiled engines were built for; the manifest's `runtime_options`."""

    tensorrt_llm: str  # version of the library
    gpu: str
    compute_capability: str  # such as "9.0"
    max_batch_size: int  # windows in flight
    encoder_batch: int  # windows per encoder step
    max_beam_width: int


def limits_of(engine: Engine) -> Limits:
    """The limits in an engine's manifest.

    Raises:
        EngineError: the engine is for another runtime, or its limits are malformed.
    """
    manifest = engine.manifest
    if manifest.runtime != "tensorrt_llm":
        raise EngineError(
            f"engine {engine.path} is for the runtime {manifest.runtime!r}, expected "
            f"'tensorrt_llm'; set build.runtime and {REBUILD}"
        )
    where = f"{engine.path}: runtime_options"
    return from_table(Limits, manifest.runtime_options, where, error=EngineError, advice=REBUILD)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU that TensorRT-LLM would use."""

    name: str
    compute_capability: tuple[int, int]

    @property
    def capability(self) -> str:
        """Compute capability as text, such as "9.0"."""
        return ".".join(map(str, self.compute_capability))


def library_version() -> str:
    """Version of the installed TensorRT-LLM, one that compiles engines; nothing is imported.

    Raises:
        UnavailableError: it is not installed, or not of release 1.2.
    """
    version, release = _installed("release 1.2", _MEND)
    if release > RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but from 1.3 on it neither compiles nor runs "
            "engines (trtllm-build and the engine executor were removed); expected 1.2; build "
            f"with build.runtime = 'tensorrt_llm_api', or {_MEND}"
        )
    if release != RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but its checkpoints have other tensor names; "
            f"expected 1.2; {_MEND}"
        )
    return version


def api_version() -> str:
    """Version of the installed TensorRT-LLM, one whose LLM API runs Whisper; nothing is imported.

    Raises:
        UnavailableError: it is not installed, older than 1.3, a 1.3 from before Whisper, or for
            another numpy.
    """
    version, release = _installed("release 1.3 or later", _MEND_API)
    if release < API_RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, whose LLM API has no Whisper; expected 1.3 or "
            f"later; build with build.runtime = 'tensorrt_llm', or {_MEND_API}"
        )
    spec = importlib.util.find_spec("tensorrt_llm")
    folders = spec.submodule_search_locations if spec is not None else None
    if not any((Path(folder) / WHISPER_MODEL).is_file() for folder in folders or []):
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but without {WHISPER_MODEL}: it is from before "
            f"its PyTorch backend got Whisper; {_MEND_API}"
        )
    _check_numpy(version)
    return version


def _check_numpy(version: str) -> None:
    """Refuse a library that was built for another numpy, whose import would end in a riddle.

    Raises:
        UnavailableError: its metadata asks for another numpy than is installed.
    """
    found = importlib.metadata.version("numpy")
    for line in importlib.metadata.requires("tensorrt_llm") or []:
        need = Requirement(line)
        if need.name == "numpy" and not need.specifier.contains(found, prereleases=True):
            raise UnavailableError(
                f"TensorRT-LLM {version} needs numpy{need.specifier}, but this environment has "
                f"{found}, as tritonserver's Python stub needs; run `python -m serve transcribe` "
                "in an environment of its own, such as NVIDIA's image tensorrt-llm/release, or "
                "build with build.runtime = 'native'"
            )


def installed_release() -> tuple[int, ...]:
    """Major and minor version of the installed TensorRT-LLM, whichever it is.

    Raises:
        UnavailableError: it is not installed.
    """
    return _installed("release 1.2 or later", _MEND)[1]


def _installed(expected: str, mend: str) -> tuple[str, tuple[int, ...]]:
    """The installed version, as text and as (major, minor)."""
    try:
        version = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(
            f"TensorRT-LLM is not installed, expected {expected}; {mend}"
        ) from error
    return version, tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def find_gpu(device: str) -> Gpu:
    """The configured GPU.

    Raises:
        UnavailableError: `device` names none that is there.
    """
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise UnavailableError(
            f"TensorRT-LLM needs an NVIDIA GPU; runtime.device = {device!r} and this machine has "
            f"{torch.cuda.device_count()} CUDA devices; set runtime.device to cuda or cuda:N there"
        )
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise UnavailableError(
            f"runtime.device = {device!r}, but this machine has "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), (major, minor))


def check_build(engine: Engine, limits: Limits, version: str, gpu: Gpu) -> None:
    """Refuse an engine compiled by another version or for another GPU: both would crash later.

    Raises:
        EngineError: names what was found and what the engine needs.
    """
    if version != limits.tensorrt_llm:
        raise EngineError(
            f"engine {engine.path} was compiled by TensorRT-LLM {limits.tensorrt_llm}, found "
            f"{version}; {REBUILD}"
        )
    if gpu.capability != limits.compute_capability:
        raise EngineError(
            f"engine {engine.path} was compiled for compute capability "
            f"{limits.compute_capability} ({limits.gpu}), found {gpu.capability} ({gpu.name}); "
            f"{REBUILD} on this machine"
        )


def check_config(limits: Limits, config: RuntimeConfig) -> None:
    """Refuse settings beyond the limits that the engine was compiled with.

    Raises:
        ConfigError: names the key, its value and the limit.
    """
    asked = {
        "runtime.slots": (config.slots, limits.max_batch_size),
        "runtime.tensorrt_llm.beam_width": (config.tensorrt_llm.beam_width, limits.max_beam_width),
    }
    for key, (value, limit) in asked.items():
        if value > limit:
            raise ConfigError(
                f"{key} = {value}, but the engine was built for at most {limit}; lower it or "
                f"{REBUILD}"
            )
