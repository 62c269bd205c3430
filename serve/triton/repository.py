"""Triton's model repository, written anew for each run from the templates beside this file."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve.config import RuntimeConfig
from serve.triton.wire import MODEL, STREAM_MODEL

BEHIND = "tensorrt_llm"  # the model that decodes behind ours

_PACKAGE = Path(__file__).resolve().parent
_TEMPLATE = _PACKAGE / "model_repository" / MODEL
_TEMPLATE_BEHIND = _PACKAGE / "model_repository_trtllm" / BEHIND / "config.pbtxt"


def write_repository(folder: Path, toml: Path, engine: Path, config: RuntimeConfig) -> Path:
    """Write `<folder>/models`: both models, and the one that decodes behind them if there is one.

    Each has this package beside its code, because the Python backend's stub looks there.

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
    behind = ""
    if config.tensorrt_llm.triton_backend:
        behind = write_model_behind(repository, engine, config)
    for name in (MODEL, STREAM_MODEL):
        code = repository / name / "1"
        code.mkdir(parents=True)
        values = {
            "name": name,
            "decoupled": name == STREAM_MODEL,  # True and False are Triton's words, too
            "config": toml,
            "engine": engine.resolve(),
            "relay": folder / "relay.sock",
            "failure": folder / "failure",
            "behind": behind,
        }
        text = _filled(_TEMPLATE / "config.pbtxt", values)
        (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
        (code / "model.py").symlink_to(_TEMPLATE / "1" / "model.py")
        (code / "serve").symlink_to(_PACKAGE.parent)
    return repository


def write_model_behind(repository: Path, engine_path: Path, config: RuntimeConfig) -> str:
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
    # They load torch, which no other server needs here.
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
    (repository / BEHIND / "1").mkdir(parents=True)
    text = _filled(_TEMPLATE_BEHIND, values)
    (repository / BEHIND / "config.pbtxt").write_text(text, encoding="utf-8")
    return BEHIND


def _filled(template: Path, values: Mapping[str, Any]) -> str:
    """A template's text with its $-names filled in, escaped for strings of config.pbtxt."""
    escaped = {
        key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()
    }
    return string.Template(template.read_text(encoding="utf-8")).substitute(escaped)
