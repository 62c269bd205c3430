"""A checkpoint as transformers runs it, in FP32, under Whisper's rules."""

from typing import Any

import numpy as np
import torch
import transformers

from build.checkpoint import HF_DIMS, Checkpoint
from build.recordings import VerificationAudio
from build.tensor_names import source_tensor_name
from serve.contract.config import RuntimeConfig
from serve.contract.engine import TokenizerFacts
from serve.native.threads import Threads
from serve.speech.features import WINDOW_SAMPLES, log_mel

_hf: Any = transformers  # its annotations are too incomplete for strict checking


def prompt_of(facts: TokenizerFacts, language: str) -> tuple[int, ...]:
    """Return the prompt of a window in a language; of one that is unknown, as of the first."""
    if not facts.multilingual or facts.transcribe is None:
        return (facts.sot,)
    first = next(iter(facts.languages.values()))
    return (facts.sot, facts.languages.get(language, first), facts.transcribe)


def features_of(recording: VerificationAudio, mel_filters: torch.Tensor) -> torch.Tensor:
    """Compute the log-mel of a recording's first window, float32 (1, n_mels, 3000)."""
    padded = np.zeros(WINDOW_SAMPLES, np.float32)
    padded[: recording.samples.size] = recording.samples[:WINDOW_SAMPLES]
    return log_mel(torch.from_numpy(padded)[None], mel_filters)


def decode_greedily(
    model: Any, encoded: Any, prompt: tuple[int, ...], most_tokens: int
) -> torch.Tensor:
    """Decode one window with transformers under Whisper's rules.

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
    threads = Threads(RuntimeConfig())

    def follow_load(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        threads.follow()
        return scores

    # Whisper's own `generate` wraps this in a loop over windows that drops what it will hear
    # again in the next one; one window's tokens come from the loop underneath.
    ids: torch.Tensor = _hf.GenerationMixin.generate(
        model,
        encoder_outputs=encoded,
        decoder_input_ids=torch.tensor([prompt], device=model.device),
        logits_processor=[rules, follow_load],
        max_new_tokens=min(most_tokens, model.config.max_target_positions - len(prompt)),
    )
    return ids


def load_reference(checkpoint: Checkpoint) -> Any:
    """Load the checkpoint in transformers, FP32, with Whisper's special tokens and suppress lists.

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
        weights = {
            source_tensor_name(name, "hf"): t.float() for name, t in checkpoint.tensors.items()
        }
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
