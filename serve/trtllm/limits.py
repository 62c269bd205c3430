"""Limits that an engine was compiled for, and checks that this machine can run it.

Nothing here imports `tensorrt_llm`, so a check fails at once and with a clear message.
"""

import dataclasses
import os
from typing import Any

import torch

from serve.contract.codec import from_table
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, EngineError, UnavailableError
from serve.trtllm.release import library_version

ENGINES_FOLDER = "tensorrt_llm"  # in the engine folder; holds encoder/ and decoder/
CHECKPOINT_FOLDER = "checkpoint"  # in an engine for the LLM API: the Hugging Face folder
# Share of the KV cache for the encoder's output: about 1500 / (1500 + 448) positions.
CROSS_KV_FRACTION = 0.75
REBUILD = "build it again with `make build-engine CONFIG=…`"


@dataclasses.dataclass(frozen=True)
class SequenceLimits:
    """The maximum numbers of tokens of a window's sequence."""

    max_prompt_tokens: int
    max_seq_len: int  # prompt and new tokens together


@dataclasses.dataclass(frozen=True)
class EngineLimits(SequenceLimits):
    """The limits of the compiled engines, from `runtime_options` of the manifest."""

    tensorrt_llm: str  # the version of the library
    gpu: str
    compute_capability: str  # such as "9.0"
    max_batch_size: int  # windows in flight
    encoder_batch: int  # windows per encoder step
    max_beam_width: int


def limits_of(engine: Engine) -> EngineLimits:
    """Read the limits in an engine's manifest.

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
    return from_table(
        EngineLimits, manifest.runtime_options, where, error=EngineError, advice=REBUILD
    )


def find_gpu(device: str) -> Any:
    """Return the properties of the configured GPU: `name`, and compute capability `major`.`minor`.

    Raises:
        UnavailableError: `device` names no GPU of this machine.
    """
    index, count = torch.device(device).index or 0, torch.cuda.device_count()
    if not device.startswith("cuda") or index >= count:
        raise UnavailableError(
            f"TensorRT-LLM needs an NVIDIA GPU, but runtime.device = {device!r} and this machine "
            f"has {count} CUDA devices; expected cuda, or cuda:N with N below their number"
        )
    return torch.cuda.get_device_properties(index)


def visible_gpu(device: str) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for a program that uses the first visible GPU.

    None if the device is the first GPU already.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES hides the device.
    """
    index = torch.device(device).index or 0
    if index == 0:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(index + 1)]
    if index >= len(gpus):
        raise ConfigError(
            f"runtime.device = {device!r}, but CUDA_VISIBLE_DEVICES = {visible!r} shows "
            f"{len(gpus)} GPUs; expected cuda:0 to cuda:{len(gpus) - 1}"
        )
    return gpus[index]


def check_build(engine: Engine, limits: EngineLimits, device: str) -> None:
    """Check the version and the GPU that an engine was compiled for; the library would crash later.

    Raises:
        UnavailableError: the library or the GPU is missing.
        EngineError: the version or the GPU differs; the message names both.
    """
    version, gpu = library_version(), find_gpu(device)
    capability = f"{gpu.major}.{gpu.minor}"
    if (version, capability) != (limits.tensorrt_llm, limits.compute_capability):
        raise EngineError(
            f"engine {engine.path} was compiled by TensorRT-LLM {limits.tensorrt_llm} for compute "
            f"capability {limits.compute_capability} ({limits.gpu}), found {version} and "
            f"{capability} ({gpu.name}); {REBUILD} on this machine"
        )


def check_config(limits: EngineLimits, config: RuntimeConfig) -> None:
    """Check that a config is within the engine's limits, and has no key of the LLM API.

    Raises:
        ConfigError: it is not; the message names the key, its value and the limit.
    """
    if config.tensorrt_llm.python:
        raise ConfigError(
            f"runtime.tensorrt_llm.python = {config.tensorrt_llm.python!r} is for engines of the "
            "LLM API, but this engine is compiled; leave it out"
        )
    bounds = {
        "runtime.slots": (config.slots, limits.max_batch_size),
        "runtime.tensorrt_llm.beam_width": (config.tensorrt_llm.beam_width, limits.max_beam_width),
    }
    for key, (value, limit) in bounds.items():
        if value > limit:
            raise ConfigError(
                f"{key} = {value}, but the engine was built for at most {limit}; lower it or "
                f"{REBUILD}"
            )
