"""Compare an engine with its checkpoint, which transformers runs in FP32, on fixed audio.

For each window transformers decodes greedily under Whisper's rules. The engine then does the same
through its runtime, which also scores transformers' tokens (teacher forcing), so that logits can be
compared position by position. The measured deviation, which goes into the manifest, is thus that of
the operations and precisions that serve.
"""

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from build.checkpoint import HF_DIMS, Checkpoint
from build.names import foreign_name
from serve.clips import load_clips
from serve.config import Precision, RuntimeConfig
from serve.engine import Engine, TokenizerFacts
from serve.errors import AudioError, ConfigError, EngineError
from serve.files import read_bytes
from serve.messages import Samples
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Job, Runtime
from serve.speech.audio import decode, whole
from serve.speech.features import SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES, log_mel
from serve.speech.meter import Limits

MAX_TOKENS = 64  # per window, end of text included
_MAX_AUDIO_S = 3600.0
_MOST_CLIPS = 4  # each costs transformers seconds of a CPU
_MOST_SLOTS = 4
_hf: Any = transformers  # its annotations are too incomplete for strict checking


@dataclasses.dataclass(frozen=True)
class Recording:
    """Audio that an engine is verified on; only its first 30 s are used."""

    name: str
    samples: Samples  # 16 kHz mono
    language: str = "en"


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far an engine is from its checkpoint, over all windows.

    Attributes:
        logits_relative: ||engine - reference|| / ||reference||.
        logits_max_abs: the largest difference.
        token_agreement: share of positions where both rank the same token first, given the same
            tokens before.
        greedy_agreement: how much of the freely decoded tokens is equal, 1 for all.
        tokens, windows: how many were compared.
    """

    logits_relative: float
    logits_max_abs: float
    token_agreement: float
    greedy_agreement: float
    tokens: int
    windows: int


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a deviation must keep to."""

    logits_relative: float  # at most
    token_agreement: float  # at least
    greedy_agreement: float  # at least


BOUNDS: dict[Precision, Bounds] = {
    "fp16": Bounds(logits_relative=0.01, token_agreement=0.99, greedy_agreement=0.95),
    "int8": Bounds(logits_relative=0.05, token_agreement=0.95, greedy_agreement=0.85),
}


@dataclasses.dataclass(frozen=True)
class _Window:
    """One window with what transformers made of it."""

    recording: str  # its name
    features: torch.Tensor  # float32 (1, n_mels, 3000)
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # sampled, end of text included where it was reached
    logits: torch.Tensor  # float32 (len(tokens), n_vocab), which chose `tokens` before any rule


def read_recordings(paths: Iterable[str]) -> list[Recording]:
    """Read audio files.

    Raises:
        FileError: a file cannot be read.
        AudioError: it cannot be decoded; the message names it.
    """
    recordings = []
    for path in paths:
        content = read_bytes(path)
        try:
            recordings.append(Recording(path, whole(decode(content, Limits(_MAX_AUDIO_S)))))
        except AudioError as error:
            raise AudioError(f"{path}: {error}") from error
    return recordings


def recordings_of(manifest: Path) -> list[Recording]:
    """Read four of a manifest's clips that fit one window, of as many languages as there are.

    The longest of each language come first, then the second of each, and so on.

    Raises:
        ConfigError: the manifest is malformed, or none of its clips with text fits one window.
        FileError: the manifest or a file cannot be read.
        AudioError: a file cannot be decoded.
    """
    places: collections.Counter[str] = collections.Counter()  # taken, by language
    ranked = []
    for clip in sorted(load_clips(manifest), key=lambda clip: -clip.duration_s):
        if clip.text and clip.language and clip.duration_s <= WINDOW_S:
            ranked.append((places[clip.language], clip.language, str(clip.path)))
            places[clip.language] += 1
    if not ranked:
        raise ConfigError(
            f"{manifest} lists no clip with text of at most {WINDOW_S} s to verify on; name "
            "audio with --audio, or build with --no-verify"
        )
    return [
        dataclasses.replace(recording, language=language)
        for _, language, file in sorted(ranked)[:_MOST_CLIPS]
        for recording in read_recordings([file])
    ]


def synthetic_recordings() -> list[Recording]:
    """Deterministic sounds with the pitch, rhythm and noise of speech, though not its words."""
    rng = np.random.default_rng(0)
    recordings = []
    for seconds in (WINDOW_S, 6):
        time = np.arange(seconds * SAMPLE_RATE) / SAMPLE_RATE
        pitch = 140 + 40 * np.sin(2 * np.pi * 0.4 * time)
        phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
        voice = sum(np.sin(phase * k) * np.cos(time * k) / k for k in range(1, 20))
        syllables = np.clip(np.sin(2 * np.pi * 3 * time), 0, 1) * (np.sin(0.9 * time) > -0.6)
        samples = 0.1 * voice * syllables + 0.003 * rng.standard_normal(time.size)
        name = f"synthetic signal of {seconds} s"
        recordings.append(Recording(name, samples.astype(np.float32)))
    return recordings


def verify(
    engine: Engine,
    checkpoint: Checkpoint,
    recordings: Sequence[Recording],
    config: RuntimeConfig = RuntimeConfig(),  # noqa: B008 - frozen
) -> Deviation:
    """Measure an engine's deviation from the checkpoint that it was built from.

    Args:
        engine: of any precision.
        checkpoint: its source.
        recordings: audio to compare on, at least one.
        config: how the engine will be served: its device, where the checkpoint runs too, kernels
            and precisions. Slots and batches are as few as the recordings need.

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
    runtime = NativeRuntime(engine, config)  # first, since it says best what the machine lacks
    windows = _reference(checkpoint, recordings, config.device, engine.load_mel_filters())
    decoded = _decode(runtime, engine, windows)
    logits = _score(runtime, windows)
    runtime.close()
    deviation = _deviation(windows, decoded, logits)
    _check(deviation, engine, windows, decoded)
    return deviation


def prompt_of(facts: TokenizerFacts, language: str) -> tuple[int, ...]:
    """What a window of a language begins with; of one that is unknown, as of the first."""
    if not facts.multilingual or facts.transcribe is None:
        return (facts.sot,)
    first = next(iter(facts.languages.values()))
    return (facts.sot, facts.languages.get(language, first), facts.transcribe)


@torch.inference_mode()
def _reference(
    checkpoint: Checkpoint,
    recordings: Sequence[Recording],
    device: str,
    mel_filters: torch.Tensor,
) -> list[_Window]:
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
        windows.append(_Window(recording.name, features.cpu(), prompt, tokens, logits))
    return windows


def features_of(recording: Recording, mel_filters: torch.Tensor) -> torch.Tensor:
    """Log-mel of a recording's first window, float32 (1, n_mels, 3000)."""
    padded = np.zeros(WINDOW_SAMPLES, np.float32)
    padded[: recording.samples.size] = recording.samples[:WINDOW_SAMPLES]
    return log_mel(torch.from_numpy(padded)[None], mel_filters)


def decode_greedily(
    model: Any, encoded: Any, prompt: tuple[int, ...], most_tokens: int
) -> torch.Tensor:
    """What transformers makes of one window under Whisper's rules.

    Args:
        model: as `load_reference` returns it.
        encoded: what its encoder returned.
        prompt: begins the text.
        most_tokens: to sample, end of text included; fewer where the context is short.

    Returns:
        int64 (1, tokens): the prompt, and what was sampled.
    """
    rules = _hf.generation.WhisperTimeStampLogitsProcessor(
        model.generation_config, begin_index=len(prompt)
    )
    # Whisper's own `generate` wraps this in a loop over windows that drops what it will hear
    # again in the next one; one window's tokens come from the loop underneath.
    ids: torch.Tensor = _hf.GenerationMixin.generate(
        model,
        encoder_outputs=encoded,
        decoder_input_ids=torch.tensor([prompt], device=model.device),
        logits_processor=[rules],
        max_new_tokens=min(most_tokens, model.config.max_target_positions - len(prompt)),
    )
    return ids


def load_reference(checkpoint: Checkpoint) -> Any:
    """The checkpoint in transformers, FP32, with Whisper's special tokens and suppress lists.

    A Hugging Face folder is opened by transformers itself, without help from our table of names.
    """
    _hf.utils.logging.set_verbosity_error()
    _hf.utils.logging.disable_progress_bar()
    if checkpoint.naming == "hf":
        model = _hf.WhisperForConditionalGeneration.from_pretrained(
            checkpoint.path, dtype=torch.float32, attn_implementation="eager"
        )
    else:
        sizes = {key: getattr(checkpoint.dims, field) for field, key in HF_DIMS.items()}
        special = dict.fromkeys(("pad_token_id", "bos_token_id"), checkpoint.facts.eot)
        config = _hf.WhisperConfig(**sizes, **special, attn_implementation="eager")
        model = _hf.WhisperForConditionalGeneration(config)
        weights = {foreign_name(name, "hf"): t.float() for name, t in checkpoint.tensors.items()}
        weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
        model.load_state_dict(weights)
    facts = checkpoint.facts
    model.generation_config = _hf.GenerationConfig(
        eos_token_id=facts.eot,
        pad_token_id=facts.eot,
        decoder_start_token_id=facts.sot,
        no_timestamps_token_id=facts.no_timestamps,
        max_initial_timestamp_index=facts.max_initial_timestamp_index,
        suppress_tokens=list(facts.suppress_tokens) or None,
        begin_suppress_tokens=list(facts.begin_suppress_tokens) or None,
    )
    return model.eval()


def _decode(runtime: Runtime, engine: Engine, windows: Sequence[_Window]) -> list[tuple[int, ...]]:
    """What the runtime makes of the windows, end of text included where it was reached."""
    limit = min(MAX_TOKENS, engine.manifest.dims.n_text_ctx - len(windows[0].prompt))
    for i, window in enumerate(windows):
        options = DecodingOptions(max_tokens=limit)
        runtime.submit(Job(i, window.features[0], window.prompt, options))
    decoded: dict[int, tuple[int, ...]] = {}
    sampled: dict[int, tuple[int, ...]] = {}
    while len(decoded) < len(windows):
        for event in runtime.poll(timeout_s=1.0):
            sampled[event.job_id] = sampled.get(event.job_id, ()) + event.tokens
            if event.error is not None:
                raise event.error
            if event.finished:
                ending = (engine.manifest.tokenizer.eot,) if event.finished == "eot" else ()
                decoded[event.job_id] = sampled[event.job_id] + ending
    return [decoded[i] for i in range(len(windows))]


def _score(runtime: NativeRuntime, windows: Sequence[_Window]) -> list[torch.Tensor]:
    """The runtime's logits, float32 (tokens, n_vocab), where transformers chose its tokens."""
    scored = []
    for window in windows:
        fed = torch.tensor([window.prompt + window.tokens[:-1]])
        logits = runtime.teacher_forced_logits(window.features, fed)[0]
        scored.append(logits[len(window.prompt) - 1 :].cpu())
    return scored


def _deviation(
    windows: Sequence[_Window], decoded: Sequence[tuple[int, ...]], logits: list[torch.Tensor]
) -> Deviation:
    reference = torch.cat([window.logits for window in windows])
    engine = torch.cat(logits)
    difference = engine - reference
    same = (engine.argmax(dim=1) == reference.argmax(dim=1)).float()
    ratios = [
        difflib.SequenceMatcher(None, window.tokens, tokens, autojunk=False).ratio()
        for window, tokens in zip(windows, decoded, strict=True)
    ]
    return Deviation(
        logits_relative=float(difference.norm() / reference.norm()),
        logits_max_abs=float(difference.abs().max()),
        token_agreement=float(same.mean()),
        greedy_agreement=sum(ratios) / len(ratios),
        tokens=len(reference),
        windows=len(windows),
    )


def _check(
    deviation: Deviation,
    engine: Engine,
    windows: Sequence[_Window],
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
    for name in ("token_agreement", "greedy_agreement"):
        found, least = getattr(deviation, name), getattr(bounds, name)
        if found < least:
            broken.append(f"{name.replace('_', ' ')} {found:.2%}, at least {least:.2%} expected")
    if broken:
        raise EngineError(
            f"the {precision} engine does not match its checkpoint, {engine.manifest.source.id}: "
            f"{'; '.join(broken)}; {_first_difference(windows, decoded)}"
        )


def _first_difference(windows: Sequence[_Window], decoded: Sequence[tuple[int, ...]]) -> str:
    for window, tokens in zip(windows, decoded, strict=True):
        for i, pair in enumerate(zip(window.tokens, tokens, strict=False)):
            if pair[0] != pair[1]:
                return (
                    f"first in {window.recording}, token {i}: expected id {pair[0]}, got {pair[1]}"
                )
    return "all greedy tokens are equal"
