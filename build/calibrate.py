"""Measure the second moments of the inputs of a checkpoint's matrices on speech.

Compensated rounding (`build.quantize`) only needs the sums of x xT over these inputs x. The
checkpoint runs in transformers, FP32. Its decoder gets its own text as input, so that calibration
needs no reference texts.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from build.checkpoint import Checkpoint
from build.clips import load_clips
from build.recordings import VerificationAudio, read_recording
from build.tensor_names import source_tensor_name
from serve.contract.config import RuntimeConfig
from serve.contract.engine import mel_filters, tensor_kinds
from serve.contract.files import read_bytes
from serve.contract.manifest import Calibration
from serve.native.device import open_device
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES

_PAUSE_S = 0.5  # between the clips of a window
MAX_TOKENS = 128  # per window
# Shares of the inputs' mean power that are added to the power of each input, against overfitting.
# A window has 1500 frames as inputs of the encoder, but only some tokens as inputs of the decoder.
_FRAMES_DAMPING, _TOKENS_DAMPING = 0.01, 0.2

Moments = Mapping[str, torch.Tensor]
"""Second moments by quantised matrix: float32 (columns, columns), positive definite."""


def calibration_of(manifest: str | Path) -> Calibration:
    """Describe the calibration clips for an engine's manifest.

    Raises:
        FileError: the manifest or a clip cannot be read.
        ConfigError: the manifest is malformed.
    """
    clips, digest = load_clips(manifest), hashlib.sha256()
    for clip in clips:
        digest.update(f"{clip.language or ''} ".encode())
        digest.update(hashlib.sha256(read_bytes(clip.path)).digest())
    return Calibration(len(clips), digest.hexdigest())


def clip_windows(manifest: str | Path) -> list[VerificationAudio]:
    """Join adjacent clips of the same language to windows of at most 30 s.

    Raises:
        FileError, ConfigError: see `calibration_of`.
        AudioError: a clip cannot be decoded.
    """
    pause = np.zeros(round(_PAUSE_S * SAMPLE_RATE), np.float32)
    windows: list[VerificationAudio] = []
    for clip in load_clips(manifest):
        recording = read_recording(clip.path, clip.language)
        last = windows[-1] if windows else None
        if last and last.language == recording.language:
            joined = np.concatenate([last.samples, pause, recording.samples])
            if joined.size <= WINDOW_SAMPLES:
                windows[-1] = dataclasses.replace(last, samples=joined)
                continue
        windows.append(recording)
    return windows


@torch.inference_mode()
def second_moments(
    checkpoint: Checkpoint, windows: Sequence[VerificationAudio], device: str = "cpu"
) -> Moments:
    """Decode windows with the checkpoint, and sum the second moments of all matrices' inputs.

    Args:
        checkpoint: the checkpoint; its draft is ignored.
        windows: at least one window of speech; only its first 30 s are used.
        device: the device of the computation and of the result.

    Returns:
        The moments by the engine's names of the matrices. Matrices with the same inputs share one
        tensor.

    Raises:
        UnavailableError: the device does not exist.
    """
    from build import reference  # noqa: PLC0415 - takes seconds to load

    torch_device = open_device(RuntimeConfig(device=device))
    model = reference.load_reference(checkpoint).to(torch_device)
    filters = mel_filters(checkpoint.dims.n_mels)
    quantized = [name for name, _, kind in tensor_kinds(checkpoint.dims) if kind == "quantized"]
    sources = {name: _same_inputs(name) for name in quantized}
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        rows = inputs[0].flatten(0, -2)
        sums[name] = sums[name].addmm_(rows.T, rows) if name in sums else rows.T @ rows

    for name in set(sources.values()):
        module = source_tensor_name(name, "hf").removesuffix(".weight")
        if name == "decoder.tokens":
            module = "proj_out"
        model.get_submodule(module).register_forward_pre_hook(functools.partial(add, name))
    for window in tqdm(windows, "Calibrating", unit=" windows", leave=False):
        prompt = reference.prompt_of(checkpoint.facts, window.language)
        features = reference.features_of(window, filters).to(torch_device)
        # With its cache, the decoder computes every token once.
        reference.decode_greedily(model, model.model.encoder(features), prompt, MAX_TOKENS)
    for name, total in sums.items():
        has_frames = name.startswith("encoder.") or ".cross.k." in name
        mean = float(total.diagonal().mean())
        # If all inputs were zero, any positive diagonal works.
        total.diagonal().add_(mean * (_FRAMES_DAMPING if has_frames else _TOKENS_DAMPING) or 1.0)
    return {name: sums[source] for name, source in sources.items()}


def _same_inputs(name: str) -> str:
    """Return the matrix that represents all matrices with the same inputs."""
    side, _, layer_name = name.partition(".layers.")
    if ".cross.k." in name or ".cross.v." in name:  # the encoder's output, in every layer
        return f"{side}.layers.0.cross.k.weight"
    for part in ("k", "v"):
        layer_name = layer_name.replace(f".attn.{part}.", ".attn.q.")
    return f"{side}.layers.{layer_name}" if layer_name else name
