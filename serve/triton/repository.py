"""Triton's model repository, written anew for each run from the templates beside this file."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve.config import RuntimeConfig
from serve.triton import folder as names
from serve.triton.wire import INPUTS, MODEL, OUTPUTS, STREAM_MODEL, TensorSpec

BACKEND_MODEL = "tensorrt_llm"  # NVIDIA's C++ model, which decodes for `whisper`

_PACKAGE = Path(__file__).resolve().parent
_TEMPLATE = _PACKAGE / "model_repository" / MODEL
_BACKEND_TEMPLATE = _PACKAGE / "model_repository_trtllm" / BACKEND_MODEL / "config.pbtxt"


def write_repository(folder: Path, toml: Path, engine: Path, config: RuntimeConfig) -> Path:
    """Write `<folder>/models`: both models, and the one that decodes for them if there is one.

    Each of our models gets a link to the package `serve` beside its code, because the Python
    backend's stub looks for packages there.

    Args:
        folder: the run's own.
        toml: the configuration, for the models to read.
        engine: the engine's folder.
        config: decides whether Triton's `tensorrt_llm` model decodes.

    Returns:
        The repository.

    Raises:
        EarshotError: the engine cannot run behind Triton's `tensorrt_llm` model as configured.
    """
    repository = folder / "models"
    backend_model = ""
    if config.tensorrt_llm.triton_backend:
        backend_model = write_backend_model(repository, engine, config)
    for name in (MODEL, STREAM_MODEL):
        code = repository / name / "1"
        code.mkdir(parents=True)
        values = {
            "name": name,
            "decoupled": name == STREAM_MODEL,  # True and False are Triton's words, too
            "config": toml,
            "engine": engine.resolve(),
            "relay": folder / names.RELAY_SOCKET,
            "failure": folder / names.FAILURE,
            "alive": folder / (names.STREAM_ALIVE if name == STREAM_MODEL else names.ALIVE),
            "backend_model": backend_model,
        }
        text = _filled(_TEMPLATE / "config.pbtxt", values) + _tensor_lists()
        (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
        (code / "model.py").symlink_to(_TEMPLATE / "1" / "model.py")
        (code / "serve").symlink_to(_PACKAGE.parent)
    return repository


def write_backend_model(repository: Path, engine_path: Path, config: RuntimeConfig) -> str:
    """Write `<repository>/tensorrt_llm`, NVIDIA's C++ backend, if the engine is for it.

    Args:
        repository: the model repository; made if need be.
        engine_path: the engine's folder.
        config: slots, device and fractions.

    Returns:
        The model's name; empty: the engine is native, and `whisper` itself decodes.

    Raises:
        EngineError: the engine cannot be opened.
        ConfigError: the configuration goes beyond what the engine was built for.
    """
    # These load torch, which only this configuration needs in the launcher's process.
    from serve.engine import open_engine  # noqa: PLC0415
    from serve.trtllm.limits import ENGINES_FOLDER, check_config, limits_of  # noqa: PLC0415

    engine = open_engine(engine_path)
    if engine.manifest.runtime != "tensorrt_llm":
        return ""
    limits = limits_of(engine)
    check_config(limits, config)
    engines = engine_path.resolve() / ENGINES_FOLDER
    _, _, gpu = config.device.partition(":")  # cuda or cuda:N
    values = {
        "max_batch_size": min(config.slots, limits.max_batch_size),
        "decoder": engines / "decoder",
        "encoder": engines / "encoder",
        "max_beam_width": config.tensorrt_llm.beam_width,
        "kv_cache_fraction": config.tensorrt_llm.kv_cache_fraction,
        "cross_kv_fraction": config.tensorrt_llm.cross_kv_fraction,
        "gpu_device_ids": gpu or 0,
    }
    folder = repository / BACKEND_MODEL
    (folder / "1").mkdir(parents=True)
    text = _filled(_BACKEND_TEMPLATE, values)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    return BACKEND_MODEL


def _tensor_lists() -> str:
    """The inputs and outputs of config.pbtxt, as `serve.triton.wire` lists them."""
    # The client may leave any input out: `wire.request_from_inputs` says what belongs together.
    inputs = "".join(f"input {{ {_fields(spec)} optional: true }}\n" for spec in INPUTS.values())
    outputs = "".join(f"output {{ {_fields(spec)} }}\n" for spec in OUTPUTS.values())
    return inputs + outputs


def _fields(spec: TensorSpec) -> str:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return f'name: "{spec.name}" data_type: TYPE_{datatype} dims: {list(spec.dims)}'


def _filled(template: Path, values: Mapping[str, Any]) -> str:
    """A template's text with its $-names filled in, escaped for strings of config.pbtxt."""
    escaped = {
        key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()
    }
    return string.Template(template.read_text(encoding="utf-8")).substitute(escaped)
