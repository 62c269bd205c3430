"""`SamplingParams` of the stand-in: the fields of 1.4, and what the real one refuses."""

import collections.abc
import dataclasses

import torch

from tensorrt_llm.kinds import check


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list | None = None
    bad_token_ids: list | None = None
    stop: str | list | None = None
    stop_token_ids: list | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: torch.Tensor | None = None
    logits_processor: collections.abc.Callable | list | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self):
        check(self, TypeError)
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0.0, got temperature={self.temperature}")
        if (self.best_of or self.n) < self.n:
            raise ValueError("best_of cannot be less than n")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")

    @property
    def width(self):
        return (self.best_of or self.n) if self.use_beam_search else 1

    @property
    def greedy(self):
        return self.temperature == 0 or self.top_k == 1 or self.top_p in (None, 0.0)
