"""Engines for our own runtime: one safetensors file, INT8 or FP16."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from build.checkpoint import Checkpoint
from build.config import Config
from build.draft import draft_facts, engine_tensors
from build.quantize import layer_error, quantize_rows
from build.writer import Log, Made, disk_errors, finite
from serve.config import Precision
from serve.engine import (
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Dims,
    Engine,
    LayerError,
    scale_name,
    tensor_kinds,
)

VERIFIES = DRAFTS = True
COMPARED_BY = "python -m build verify"

Tensors = dict[str, torch.Tensor]


def check(config: Config) -> None:
    """Accept every config: whatever one can say, this builder can do."""


def commands(dims: Dims, config: Config) -> list[list[str]]:
    """None are run."""
    return []


def fill(folder: Path, checkpoint: Checkpoint, config: Config, log: Log) -> Made:
    """Convert the tensors, behind a progress bar, and write them.

    Raises:
        CheckpointError: a tensor holds values that are not finite in float16.
        EngineError: the disk is full or fails.
    """
    names = [name for name, _, _ in tensor_kinds(checkpoint.dims, draft_facts(checkpoint))]
    bar = tqdm(names, desc=f"Building {config.engine}", unit=" tensors", leave=False)
    tensors, quantization = convert(checkpoint, config.build.precision, bar)
    weights = folder / WEIGHTS_FILE
    with disk_errors(folder):
        save_file(tensors, weights)
        # save_file makes a private file; the server may run as another user than the build.
        shutil.copymode(folder / TOKENIZER_FILE, weights)
    return Made(quantization=quantization)


def is_current(engine: Engine, checkpoint: Checkpoint, config: Config) -> bool:
    """Always: checkpoint and precision, which every builder compares, decide everything."""
    return True


def convert(
    checkpoint: Checkpoint, precision: Precision, names: Iterable[str]
) -> tuple[Tensors, dict[str, LayerError]]:
    """Turn a checkpoint's tensors into an engine's, as `serve.engine.tensor_specs` lists them.

    Args:
        checkpoint: full-precision tensors.
        precision: "int8" or "fp16".
        names: every tensor's name, in any order; wrap it to show progress.

    Returns:
        The engine's tensors, and what quantising each matrix cost.

    Raises:
        CheckpointError: a tensor holds values that are not finite in float16.
    """
    kinds = {n: kind for n, _, kind in tensor_kinds(checkpoint.dims, draft_facts(checkpoint))}
    weights = engine_tensors(checkpoint)
    tensors: Tensors = {}
    errors: dict[str, LayerError] = {}
    for name in names:
        weight = weights[name]
        if precision == "int8" and kinds[name] == "quantized":
            result = quantize_rows(weight)
            tensors[name] = result.codes
            tensors[scale_name(name)] = finite(result.scale, name)
            errors[name] = layer_error(weight, result)
        else:
            tensors[name] = finite(weight.half().contiguous(), name)
    return tensors, errors
