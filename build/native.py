"""Build engines for the native runtime: one safetensors file, INT8 or FP16."""

import dataclasses
import shutil
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from build.calibrate import Moments, calibration_of, clip_windows, second_moments
from build.checkpoint import Checkpoint
from build.config import BuildConfig, BuildProduct
from build.draft import draft_facts, engine_tensors
from build.quantize import layer_error, quantize_rows
from build.writer import BuiltEngineFacts, Log, disk_errors, finite
from serve.contract.config import Precision
from serve.contract.engine import Engine, scale_name, tensor_kinds
from serve.contract.manifest import TOKENIZER_FILE, WEIGHTS_FILE, Calibration, LayerError

CALIBRATE_CLIPS = "tests/data/human/calibration.jsonl"  # manifest of the calibration clips

Tensors = dict[str, torch.Tensor]


def fill(folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log) -> BuiltEngineFacts:
    """Convert the tensors with a progress bar, and write them.

    Raises:
        FileError, ConfigError, AudioError: the calibration clips cannot be read.
        CheckpointError: a tensor holds values that are not finite in float16.
        EngineError: the disk is full or fails.
    """
    build, calibration = config.build, _calibration(config.build)
    moments: Moments = {}
    if calibration is not None:
        moments = second_moments(checkpoint, clip_windows(CALIBRATE_CLIPS), build.device)
    title, weights = f"Building {config.engine}", folder / WEIGHTS_FILE
    tensors, quantization = convert(checkpoint, build.precision, moments, title)
    with disk_errors(folder):
        save_file(tensors, weights)
        # save_file makes a private file, but the server may run as another user.
        shutil.copymode(folder / TOKENIZER_FILE, weights)
    return BuiltEngineFacts(quantization=quantization, calibration=calibration)


@dataclasses.dataclass(frozen=True)
class _InMemory(Engine):
    """An engine with weights in memory instead of files."""

    weights: Tensors

    def load_weights(self, device: torch.device | str = "cpu") -> Tensors:
        return {name: tensor.to(device) for name, tensor in self.weights.items()}


def in_precision(precision: Precision, engine: Engine, checkpoint: Checkpoint) -> Engine:
    """Make an engine of the checkpoint in another precision, in memory only.

    INT8 weights are rounded to nearest.

    Raises:
        CheckpointError: a tensor holds values that are not finite in float16.
    """
    draft = draft_facts(checkpoint)  # None if the checkpoint was opened without a draft
    weights, _ = convert(checkpoint, precision)
    manifest = dataclasses.replace(engine.manifest, precision=precision, draft=draft)
    return _InMemory(engine.path, manifest, weights)


def is_current(engine: Engine, checkpoint: Checkpoint, config: BuildProduct) -> bool:
    """Return whether the engine has the same calibration; `build.builders` compares the rest."""
    return engine.manifest.calibration == _calibration(config.build)


def _calibration(build: BuildConfig) -> Calibration | None:
    """Describe the calibration that a build has; float16 weights need none."""
    calibrates = build.calibrate and build.precision == "int8"
    return calibration_of(CALIBRATE_CLIPS) if calibrates else None


def convert(
    checkpoint: Checkpoint,
    precision: Precision,
    moments: Moments = MappingProxyType({}),
    title: str = "",
) -> tuple[Tensors, dict[str, LayerError]]:
    """Convert a checkpoint's tensors to those that `serve.contract.engine.tensor_specs` lists.

    Args:
        checkpoint: full-precision tensors.
        precision: "int8" or "fp16".
        moments: the result of `second_moments`; a matrix without one is rounded to nearest.
        title: the title of a progress bar; "": none is shown.

    Returns:
        The engine's tensors, and the quantisation error of each matrix.

    Raises:
        CheckpointError: a tensor holds values that are not finite in float16.
    """
    kinds = [*tensor_kinds(checkpoint.dims, draft_facts(checkpoint))]
    weights = engine_tensors(checkpoint)
    tensors: Tensors = {}
    errors: dict[str, LayerError] = {}
    for name, _, kind in tqdm(kinds, title, unit=" tensors", leave=False, disable=not title):
        weight = weights[name]
        if precision == "int8" and kind == "quantized":
            tensors[name], scale = quantize_rows(weight, moments.get(name))
            tensors[scale_name(name)] = finite(scale, name)
            errors[name] = layer_error(weight, tensors[name], scale)
        else:
            tensors[name] = finite(weight.half().contiguous(), name)
    return tensors, errors
