"""Engines that are broken on purpose."""

import dataclasses
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from eval.files import made_once
from serve.contract.engine import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    FileFacts,
    manifest_to_json,
    open_engine,
    scale_name,
    sha256_of,
)
from serve.contract.errors import ConfigError

_SCALE = scale_name("")


def break_engine(source: str, target: Path, layer: str, factor: float) -> None:
    """Copy an engine with wrong scales: all of one layer's matrices are multiplied.

    Args:
        source: the engine's folder.
        target: the copy's; stays as it is where it is there.
        layer: what the names of its tensors begin with, such as decoder.layers.3.
        factor: by which its scales are multiplied.

    Raises:
        ConfigError: the engine has no such layer with scales.
        EngineError: the engine cannot be opened.
    """
    engine = open_engine(source)
    made_once(target, lambda folder: _fill(folder, engine.path, layer, factor))


def _fill(folder: Path, source: Path, layer: str, factor: float) -> None:
    engine = open_engine(source)
    tensors = load_file(source / WEIGHTS_FILE)
    scales = [name for name in tensors if name.endswith(_SCALE)]
    broken = [name for name in scales if name.startswith(f"{layer}.")]
    if not broken:
        layers = sorted({".".join(name.split(".")[:3]) for name in scales if ".layers." in name})
        there = ", ".join(layers) or "none, for the engine is not of INT8"
        raise ConfigError(f"{source} has no scales of a layer {layer}; there are: {there}")
    for name in broken:
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    for name in engine.manifest.files:
        shutil.copy(source / name, folder / name)
    weights = folder / WEIGHTS_FILE
    save_file(tensors, weights)
    facts = FileFacts(sha256_of(weights), weights.stat().st_size)
    files = {**engine.manifest.files, WEIGHTS_FILE: facts}
    manifest = dataclasses.replace(engine.manifest, files=files)
    (folder / MANIFEST_FILE).write_text(manifest_to_json(manifest), encoding="utf-8")
