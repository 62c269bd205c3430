"""Compare an engine with its checkpoint in transformers, FP32, on fixed audio.

Transformers decodes each window greedily with Whisper's token rules. The engine's runtime does the
same. It also computes the logits of transformers' tokens (teacher forcing), so that logits can be
compared position by position. The measured deviation is therefore that of the operations and
precisions in service. It is stored in the manifest.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from build.checkpoint import Checkpoint
from build.clips import load_clips
from build.decoding import Tokens, WindowInput, agreement, decode_windows, first_windows
from build.native import in_precision
from build.recordings import VerificationAudio, read_recording
from build.reference import decode_greedily, features_of, load_reference, prompt_of
from serve.contract.config import EncoderPrecision, Precision, RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import EngineError
from serve.contract.manifest import Fp8Proof, TokenizerFacts
from serve.native.runtime import NativeRuntime

_ROUNDING_ADVICE = (
    "FP16 weights match: build with --precision fp16, or with --calibrate for finer INT8 rounding; "
    "to compare on speech of the checkpoint's own domain, name recordings with --audio"
)
_BUILD_ADVICE = (
    "rounding is not the cause: build the engine again; if that fails too, check the checkpoint "
    "with transformers, or name other recordings of speech with --audio"
)
MAX_TOKENS = 64  # per window, end of text included
_MAX_SLOTS = 4
_FP8_SLOTS = 8


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The deviation of an engine from its checkpoint, over all windows.

    Attributes:
        logits_relative: ||engine - reference|| / ||reference||.
        logits_max_abs: the largest difference of two logits.
        token_agreement: the share of positions with the same likeliest token, given the same
            earlier tokens.
        greedy_agreement: the share of equal tokens in freely decoded text, 1 for all.
        fp16_greedy_agreement: the same with FP16 weights.
        tokens, windows: the numbers of tokens and windows compared.
    """

    logits_relative: float
    logits_max_abs: float
    token_agreement: float
    greedy_agreement: float
    fp16_greedy_agreement: float
    tokens: int
    windows: int


# A token that INT8 rounding changes also changes the tokens after it, so a correct engine may agree
# little on a difficult clip. Logits for the same text measure the rounding; agreement over a few
# hundred tokens is coarse. Only free decoding tests the engine's own decoding steps.
_MAX_LOGITS_RELATIVE: dict[Precision, float] = {"fp16": 0.01, "int8": 0.05}
_MIN_AGREEMENT: dict[Precision, dict[str, float]] = {
    "fp16": {"token_agreement": 0.99, "greedy_agreement": 0.95},
    "int8": {"token_agreement": 0.9, "greedy_agreement": 0.5},
}
_MIN_FP16_AGREEMENT = 0.95  # with fewer equal tokens the operations are wrong


@dataclasses.dataclass(frozen=True)
class _ReferenceWindow(WindowInput):
    """A window and its results in transformers."""

    tokens: tuple[int, ...]  # sampled tokens, with end of text if it was reached
    logits: torch.Tensor  # float32 (len(tokens), n_vocab), before the token rules


def verify(
    engine: Engine,
    checkpoint: Checkpoint,
    recordings: Sequence[VerificationAudio],
    config: RuntimeConfig = RuntimeConfig(),  # noqa: B008 - frozen
) -> Deviation:
    """Measure an engine's deviation from its checkpoint, with a progress bar.

    Args:
        engine: an engine of any precision.
        checkpoint: the checkpoint that it was built from.
        recordings: audio to compare on, at least one.
        config: the device of both, and the kernels and precisions of the engine. Slots and batches
            are as few as the recordings need. On a CPU "auto" means float32.

    Raises:
        EngineError: the engine was built from other weights, or exceeds a limit.
        UnavailableError: the device does not exist, or does not support the configuration.
    """
    source = engine.manifest.source
    if source.sha256 != checkpoint.source.sha256:
        raise EngineError(
            f"{engine.path} was built from {source.id} (SHA-256 {source.sha256}), not from "
            f"{checkpoint.source.id} ({checkpoint.source.sha256}); build the engine again"
        )
    slots, threads = min(len(recordings), _MAX_SLOTS), torch.get_num_threads()
    config = dataclasses.replace(config, slots=slots, encoder_batch=1, threads=threads)
    # Use full precision, so that the verdict on the engine is the same on any device.
    if config.device == "cpu" and config.compute_type == "auto":
        config = dataclasses.replace(config, compute_type="float32")
    if config.encoder_precision == "auto":
        config = dataclasses.replace(config, encoder_precision="full")
    rounded = engine.manifest.precision != "fp16"
    total = len(recordings) * (4 if rounded else 3)
    with tqdm(desc="Verifying", total=total, unit=" windows", leave=False) as bar:
        runtime = NativeRuntime(engine, config)  # first, for its clear errors on a lack of memory
        filters = engine.load_mel_filters()
        windows = _reference(checkpoint, recordings, config.device, filters, bar.update)
        limit = min(MAX_TOKENS, engine.manifest.dims.n_text_ctx - len(windows[0].prompt))
        end = (engine.manifest.tokenizer.eot,)
        decoded = decode_windows(runtime, windows, limit, bar.update, end)
        logits = _score(runtime, windows, bar.update)
        runtime.close()
        fp16 = decoded
        if rounded:
            runtime = NativeRuntime(in_precision("fp16", engine, checkpoint), config)
            fp16 = decode_windows(runtime, windows, limit, bar.update, end)
            runtime.close()
    deviation = _deviation(windows, decoded, fp16, logits)
    _check(deviation, engine)
    return deviation


@torch.inference_mode()
def _reference(
    checkpoint: Checkpoint,
    recordings: Sequence[VerificationAudio],
    device: str,
    mel_filters: torch.Tensor,
    on_window: Callable[[], object],
) -> list[_ReferenceWindow]:
    model = load_reference(checkpoint).to(device)
    facts = checkpoint.facts
    windows = []
    for recording in recordings:
        features = features_of(recording, mel_filters).to(device)
        prompt = prompt_of(facts, recording.language)
        encoded = model.model.encoder(features)
        ids = decode_greedily(model, encoded, prompt, MAX_TOKENS)
        logits = model(encoder_outputs=encoded, decoder_input_ids=ids[:, :-1]).logits[0]
        tokens = tuple(ids[0, len(prompt) :].tolist())
        logits = logits[len(prompt) - 1 :].float().cpu()
        windows.append(_ReferenceWindow(features.cpu(), prompt, tokens, logits))
        on_window()
    return windows


def _score(
    runtime: NativeRuntime, windows: Sequence[_ReferenceWindow], on_window: Callable[[], object]
) -> list[torch.Tensor]:
    """Compute the runtime's logits at transformers' tokens; float32 (tokens, n_vocab) a window."""
    window_logits = []
    for window in windows:
        tokens = torch.tensor([window.prompt + window.tokens[:-1]])
        logits = runtime.teacher_forced_logits(window.features, tokens)[0]
        window_logits.append(logits[len(window.prompt) - 1 :].cpu())
        on_window()
    return window_logits


def _deviation(
    windows: Sequence[_ReferenceWindow],
    decoded: Sequence[tuple[int, ...]],
    fp16: Sequence[tuple[int, ...]],
    logits: list[torch.Tensor],
) -> Deviation:
    reference = torch.cat([window.logits for window in windows])
    engine = torch.cat(logits)
    difference = engine - reference
    same = (engine.argmax(dim=1) == reference.argmax(dim=1)).float()
    expected = [window.tokens for window in windows]
    return Deviation(
        logits_relative=float(difference.norm() / reference.norm()),
        logits_max_abs=float(difference.abs().max()),
        token_agreement=float(same.mean()),
        greedy_agreement=agreement(expected, decoded),
        fp16_greedy_agreement=agreement(expected, fp16),
        tokens=len(reference),
        windows=len(windows),
    )


def _check(deviation: Deviation, engine: Engine) -> None:
    precision = engine.manifest.precision
    max_relative, problems = _MAX_LOGITS_RELATIVE[precision], list[str]()
    if not deviation.logits_relative <= max_relative:  # "not" also catches NaN
        problems.append(
            f"logits deviate by {deviation.logits_relative:.2%}, expected at most "
            f"{max_relative:.2%}"
        )
    shares = {**_MIN_AGREEMENT[precision], "fp16_greedy_agreement": _MIN_FP16_AGREEMENT}
    problems += [
        f"{name.replace('_', ' ')} is {getattr(deviation, name):.2%}, expected at least {limit:.2%}"
        for name, limit in shares.items()
        if getattr(deviation, name) < limit
    ]
    if problems:
        only_rounding = (
            precision != "fp16" and deviation.fp16_greedy_agreement >= _MIN_FP16_AGREEMENT
        )
        raise EngineError(
            f"the {precision} engine does not match its checkpoint, {engine.manifest.source.id}: "
            f"{'; '.join(problems)}; "
            f"{_ROUNDING_ADVICE if only_rounding else _BUILD_ADVICE}"
        )


def prove_fp8(
    engine: Engine, checkpoint: Checkpoint, manifest: str | Path, config: RuntimeConfig
) -> Fp8Proof:
    """Verify that an engine's encoder may compute in FP8, on decoded speech, with a progress bar.

    Speech is decoded greedily three times: with the encoder in full precision, in FP8, and in full
    precision with weights of the other precision. FP8 may change as much of the text as INT8
    weights.

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
        config, slots=_FP8_SLOTS, rows=0, encoder_batch=1, draft_tokens=0, cuda_graph=False
    )
    windows = first_windows(_speech(manifest, engine.manifest.tokenizer), engine)
    total = 3 * len(windows)
    with tqdm(desc="Verifying FP8", total=total, unit=" windows", leave=False) as bar:

        def decoded(engine: Engine, precision: EncoderPrecision) -> list[Tokens]:
            settings = dataclasses.replace(config, encoder_precision=precision)
            with contextlib.closing(NativeRuntime(engine, settings)) as runtime:
                return decode_windows(runtime, windows, on_window=bar.update)

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
    languages = facts.languages if facts.multilingual else ("en",)
    return [
        read_recording(clip.path, clip.language)
        for clip in load_clips(manifest)
        if clip.half != "report" and clip.language in languages
    ]
