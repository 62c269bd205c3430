"""Run a checkpoint in transformers, in FP32 and with Whisper's token rules."""

from typing import Any

import numpy as np
import torch
import transformers

from build.checkpoint import HF_DIMS, Checkpoint
from build.recordings import VerificationAudio
from build.tensor_names import source_tensor_name
from serve.contract.manifest import TokenizerFacts
from serve.speech.features import WINDOW_SAMPLES, log_mel

_hf: Any = transformers  # its annotations are too incomplete for strict checking


def prompt_of(facts: TokenizerFacts, language: str) -> tuple[int, ...]:
    """Return the prompt of a window in a language; an unknown language becomes the first one."""
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
    model: Any, encoded: Any, prompt: tuple[int, ...], max_tokens: int
) -> torch.Tensor:
    """Decode one window in transformers with Whisper's token rules.

    Args:
        model: the result of `load_reference`.
        encoded: the encoder's output.
        prompt: the tokens before the text.
        max_tokens: the maximum number of sampled tokens, end of text included; a short context
            may allow fewer.

    Returns:
        int64 (1, tokens): the prompt and the sampled tokens.
    """
    rules = _hf.generation.WhisperTimeStampLogitsProcessor(
        model.generation_config, begin_index=len(prompt)
    )
    # Whisper's own `generate` is a loop over windows, and drops text that the next window repeats.
    # Its base class decodes exactly one window.
    ids: torch.Tensor = _hf.GenerationMixin.generate(
        model,
        encoder_outputs=encoded,
        decoder_input_ids=torch.tensor([prompt], device=model.device),
        logits_processor=[rules],
        max_new_tokens=min(max_tokens, model.config.max_target_positions - len(prompt)),
    )
    return ids


def load_reference(checkpoint: Checkpoint) -> Any:
    """Load the checkpoint in transformers, FP32, with Whisper's special tokens and suppress lists.

    Transformers itself opens a Hugging Face folder, without `build.tensor_names`.
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
