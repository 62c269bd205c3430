"""Write Triton's model repository for a run from the templates in `serve/triton`."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve.wire.tensors import INPUTS, MODEL, OUTPUTS, TensorSpec

_SERVE = Path(__file__).resolve().parents[1]
_TEMPLATE = _SERVE / "triton" / "model_repository" / MODEL


def write_repository(folder: Path, toml: Path, engine: Path) -> Path:
    """Write `<folder>/models` with the model `whisper`.

    The package `serve` is linked beside the model's code, because the Python backend's stub looks
    for packages there.

    Args:
        folder: the run's own.
        toml: the configuration, for the model to read.
        engine: the engine's folder.

    Returns:
        The repository.
    """
    repository = folder / "models"
    code = repository / MODEL / "1"
    code.mkdir(parents=True)
    values = {
        "name": MODEL,
        "config": toml,
        "engine": engine.resolve(),
        "folder": folder,
    }
    text = _filled(_TEMPLATE / "config.pbtxt", values) + _tensor_lists()
    (repository / MODEL / "config.pbtxt").write_text(text, encoding="utf-8")
    (code / "model.py").symlink_to(_TEMPLATE / "1" / "model.py")
    (code / "serve").symlink_to(_SERVE)
    return repository


def _tensor_lists() -> str:
    """Return the inputs and outputs of config.pbtxt, which `serve.wire.tensors` lists."""
    # A client may omit any input; `wire.request_from_inputs` checks which belong together.
    inputs = "".join(f"input {{ {_fields(spec)} optional: true }}\n" for spec in INPUTS.values())
    outputs = "".join(f"output {{ {_fields(spec)} }}\n" for spec in OUTPUTS.values())
    return inputs + outputs


def _fields(spec: TensorSpec) -> str:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return f'name: "{spec.name}" data_type: TYPE_{datatype} dims: {list(spec.dims)}'


def _filled(template: Path, values: Mapping[str, Any]) -> str:
    """Fill in the $-names of a template, escaped for strings of config.pbtxt."""
    escaped = {
        key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()
    }
    return string.Template(template.read_text(encoding="utf-8")).substitute(escaped)
