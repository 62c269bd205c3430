"""Compare an engine with its checkpoint, which transformers runs in FP32, on fixed audio.

For each window transformers decodes greedily under Whisper's rules. The engine then does the same
through its runtime, which also scores transformers' tokens (teacher forcing), so that logits can be
compared position by position. The measured deviation, which goes into the manifest, is thus that of
the operations and precisions that serve.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from build.checkpoint import Checkpoint
from build.decoding import WindowInput, agreement, decode_windows
from build.native import in_precision
from build.progress import progress
from build.recordings import VerificationAudio
from build.reference import decode_greedily, features_of, load_reference, prompt_of
from serve.contract.config import Precision, RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import EngineError
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import Runtime

_FINER = (
    "FP16 weights match: build with --precision fp16, or with --calibrate for finer INT8 rounding; "
    "to compare on speech that the checkpoint was made for, name recordings with --audio"
)
_OTHER = (
    "rounding does not explain it: build the engine again; if that fails too, check the checkpoint "
    "with transformers, or name other recordings of speech with --audio"
)
MAX_TOKENS = 64  # per window, end of text included
_MOST_SLOTS = 4


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The distance of an engine from its checkpoint, over all windows.

    Attributes:
        logits_relative: ||engine - reference|| / ||reference||.
        logits_max_abs: the largest difference.
        token_agreement: share of positions where both rank the same token first, given the same
            tokens before.
        greedy_agreement: how much of the freely decoded tokens is equal, 1 for all.
        fp16_greedy_agreement: the same with FP16 weights, which cost nothing but size.
        tokens, windows: how many were compared.
    """

    logits_relative: float
    logits_max_abs: float
    token_agreement: float
    greedy_agreement: float
    fp16_greedy_agreement: float
    tokens: int
    windows: int


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of a deviation."""

    logits_relative: float  # at most
    token_agreement: float  # at least
    greedy_agreement: float  # at least
    fp16_greedy_agreement: float = 0.95  # at least: the operations are right


# One token that INT8 rounding changes also changes the tokens after it, so a sound engine may agree
# little on a clip that is hard to hear. Logits given the same text tell how good the rounding is;
# shares of the few hundred tokens are coarse. Free decoding tells that the engine's own steps work,
# which all else would miss.
BOUNDS: dict[Precision, Bounds] = {
    "fp16": Bounds(logits_relative=0.01, token_agreement=0.99, greedy_agreement=0.95),
    "int8": Bounds(logits_relative=0.05, token_agreement=0.9, greedy_agreement=0.5),
}


@dataclasses.dataclass(frozen=True)
class _ReferenceWindow(WindowInput):
    """One window with what transformers made of it."""

    recording: str  # its name
    tokens: tuple[int, ...]  # sampled, end of text included where it was reached
    logits: torch.Tensor  # float32 (len(tokens), n_vocab), which chose `tokens` before any rule


def verify(
    engine: Engine,
    checkpoint: Checkpoint,
    recordings: Sequence[VerificationAudio],
    config: RuntimeConfig = RuntimeConfig(),  # noqa: B008 - frozen
) -> Deviation:
    """Measure an engine's deviation from the checkpoint that it was built from, behind a bar.

    Args:
        engine: of any precision.
        checkpoint: its source.
        recordings: audio to compare on, at least one.
        config: how the engine will be served: its device, where the checkpoint runs too, kernels
            and precisions. Slots and batches are as few as the recordings need; a CPU computes in
            float32 unless it says otherwise.

    Raises:
        EngineError: the engine was built from other weights, or a bound of `BOUNDS` is broken;
            the message names the first difference.
        UnavailableError: the device, or what else the configuration orders, is not there.
    """
    source = engine.manifest.source
    if source.sha256 != checkpoint.source.sha256:
        raise EngineError(
            f"{engine.path} was built from {source.id} (SHA-256 {source.sha256}), not from "
            f"{checkpoint.source.id} ({checkpoint.source.sha256}); build the engine again"
        )
    slots, threads = min(len(recordings), _MOST_SLOTS), torch.get_num_threads()
    config = dataclasses.replace(config, slots=slots, encoder_batch=1, threads=threads)
    # It is the engine that is looked at, with the same verdict on any device.
    if config.device == "cpu" and config.compute_type == "auto":
        config = dataclasses.replace(config, compute_type="float32")
    if config.encoder_precision == "auto":
        config = dataclasses.replace(config, encoder_precision="full")
    rounded = engine.manifest.precision != "fp16"
    total = len(recordings) * (4 if rounded else 3)
    with progress("Verifying", total, "windows") as done:
        runtime = NativeRuntime(engine, config)  # first, since it says best what the machine lacks
        filters = engine.load_mel_filters()
        windows = _reference(checkpoint, recordings, config.device, filters, done)
        decoded = _decode(runtime, engine, windows, done)
        logits = _score(runtime, windows, done)
        runtime.close()
        fp16 = decoded
        if rounded:
            runtime = NativeRuntime(in_precision("fp16", engine, checkpoint), config)
            fp16 = _decode(runtime, engine, windows, done)
            runtime.close()
    deviation = _deviation(windows, decoded, fp16, logits)
    _check(deviation, engine, windows, decoded)
    return deviation


@torch.inference_mode()
def _reference(
    checkpoint: Checkpoint,
    recordings: Sequence[VerificationAudio],
    device: str,
    mel_filters: torch.Tensor,
    done: Callable[[], None],
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
        windows.append(_ReferenceWindow(features.cpu(), prompt, recording.name, tokens, logits))
        done()
    return windows


def _decode(
    runtime: Runtime, engine: Engine, windows: Sequence[_ReferenceWindow], done: Callable[[], None]
) -> list[tuple[int, ...]]:
    """Decode the windows with the runtime, end of text included where it was reached."""
    limit = min(MAX_TOKENS, engine.manifest.dims.n_text_ctx - len(windows[0].prompt))
    eot = engine.manifest.tokenizer.eot
    decoded = decode_windows(runtime, windows, limit, done)
    return [one.tokens + (eot,) * one.ended for one in decoded]


def _score(
    runtime: NativeRuntime, windows: Sequence[_ReferenceWindow], done: Callable[[], None]
) -> list[torch.Tensor]:
    """Score transformers' tokens by the runtime: its logits, float32 (tokens, n_vocab)."""
    scored = []
    for window in windows:
        fed = torch.tensor([window.prompt + window.tokens[:-1]])
        logits = runtime.teacher_forced_logits(window.features, fed)[0]
        scored.append(logits[len(window.prompt) - 1 :].cpu())
        done()
    return scored


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


def _check(
    deviation: Deviation,
    engine: Engine,
    windows: Sequence[_ReferenceWindow],
    decoded: Sequence[tuple[int, ...]],
) -> None:
    precision = engine.manifest.precision
    bounds = BOUNDS[precision]
    broken = []
    if not deviation.logits_relative <= bounds.logits_relative:  # so that NaN breaks it too
        broken.append(
            f"logits deviate by {deviation.logits_relative:.2%}, at most "
            f"{bounds.logits_relative:.2%} allowed"
        )
    for name in ("token_agreement", "greedy_agreement", "fp16_greedy_agreement"):
        share, least = getattr(deviation, name), getattr(bounds, name)
        if share < least:
            broken.append(f"{name.replace('_', ' ')} {share:.2%}, at least {least:.2%} expected")
    if broken:
        rounding = precision != "fp16"
        sound = deviation.fp16_greedy_agreement >= bounds.fp16_greedy_agreement
        raise EngineError(
            f"the {precision} engine does not match its checkpoint, {engine.manifest.source.id}: "
            f"{'; '.join(broken)}; {_first_difference(windows, decoded)}; "
            f"{_FINER if rounding and sound else _OTHER}"
        )


def _first_difference(
    windows: Sequence[_ReferenceWindow], decoded: Sequence[tuple[int, ...]]
) -> str:
    for window, tokens in zip(windows, decoded, strict=True):
        for i, pair in enumerate(zip(window.tokens, tokens, strict=False)):
            if pair[0] != pair[1]:
                return (
                    f"first in {window.recording}, token {i}: expected id {pair[0]}, got {pair[1]}"
                )
    return "all greedy tokens are equal"
