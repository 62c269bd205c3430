"""Verify that an engine's encoder may compute in FP8, on decoded speech.

Speech is decoded greedily three times: with the encoder in full precision, in FP8, and in full
precision with weights of the other precision. FP8 may change as much of the text as INT8 weights.
"""

import dataclasses
from pathlib import Path

import torch

from build.checkpoint import Checkpoint
from build.clips import load_clips
from build.decoding import Tokens, agreement, decode_windows, first_windows
from build.native import in_precision
from build.progress import progress
from build.recordings import VerificationAudio, read_recordings
from serve.contract.config import EncoderPrecision, RuntimeConfig
from serve.contract.engine import Engine, TokenizerFacts
from serve.contract.manifest import Fp8Proof
from serve.native.runtime import NativeRuntime

_SLOTS = 8


def prove_fp8(
    engine: Engine, checkpoint: Checkpoint, manifest: str | Path, config: RuntimeConfig
) -> Fp8Proof:
    """Decode windows of speech with and without FP8, with a progress bar.

    Args:
        engine: an engine of any precision.
        checkpoint: the checkpoint that it was built from.
        manifest: the manifest of clips; the first 30 s of each are decoded. Clips of the half
            "report", which published figures use, and of unknown languages are left out.
        config: the device, kernels and other precisions to decode with.

    Raises:
        FileError, ConfigError, AudioError: the clips cannot be read.
        UnavailableError: the device does not support FP8, or has too little memory.
    """
    config = dataclasses.replace(
        config, slots=_SLOTS, rows=0, encoder_batch=1, draft_tokens=0, cuda_graph=False
    )
    windows = first_windows(_speech(manifest, engine.manifest.tokenizer), engine)
    with progress("Verifying FP8", 3 * len(windows), "windows") as done:

        def decoded(engine: Engine, precision: EncoderPrecision) -> list[Tokens]:
            runtime = NativeRuntime(
                engine, dataclasses.replace(config, encoder_precision=precision)
            )
            try:
                return [one.tokens for one in decode_windows(runtime, windows, done=done)]
            finally:
                runtime.close()

        full, fp8 = decoded(engine, "full"), decoded(engine, "fp8")
        other = in_precision(
            "fp16" if engine.manifest.precision == "int8" else "int8", engine, checkpoint
        )
        rounded = decoded(other, "full")
    return Fp8Proof(
        agreement=agreement(full, fp8),
        int8_agreement=agreement(full, rounded),
        windows=len(windows),
        device=torch.cuda.get_device_name(config.device),
    )


def _speech(manifest: str | Path, facts: TokenizerFacts) -> list[VerificationAudio]:
    known = facts.languages if facts.multilingual else ("en",)
    clips = [clip for clip in load_clips(manifest) if clip.half != "report"]
    return [
        dataclasses.replace(recording, language=str(clip.language))
        for clip in clips
        if clip.language in known
        for recording in read_recordings([str(clip.path)])
    ]
