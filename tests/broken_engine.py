"""Engines that are broken on purpose."""

import dataclasses
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from serve.contract.engine import open_engine, scale_name, sha256_of
from serve.contract.manifest import MANIFEST_FILE, WEIGHTS_FILE, FileFacts, manifest_to_json


def break_engine(source: str, target: Path, layer: str, factor: float) -> None:
    """Copy an engine to a new folder; multiply the scales of a layer such as decoder.layers.3."""
    engine = open_engine(source)
    tensors = load_file(engine.path / WEIGHTS_FILE)
    broken = [n for n in tensors if n.startswith(f"{layer}.") and n.endswith(scale_name(""))]
    assert broken, f"no scales of {layer}"
    for name in broken:
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    target.mkdir()
    for name in engine.manifest.files:
        shutil.copy(engine.path / name, target / name)
    weights = target / WEIGHTS_FILE
    save_file(tensors, weights)
    facts = FileFacts(sha256_of(weights), weights.stat().st_size)
    files = {**engine.manifest.files, WEIGHTS_FILE: facts}
    manifest = dataclasses.replace(engine.manifest, files=files)
    (target / MANIFEST_FILE).write_text(manifest_to_json(manifest), encoding="utf-8")
