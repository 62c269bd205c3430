"""`SamplingParams` of the stand-in: what NVIDIA's own Whisper test passes, with the refusals."""

import dataclasses

from tensorrt_llm.kinds import check


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    max_tokens: int = 32
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    temperature: float | None = None
    length_penalty: float | None = None
    logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self):
        check(self, TypeError)
        if (self.best_of or self.n) < self.n:
            raise ValueError("best_of cannot be less than n")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")

    @property
    def width(self):
        return (self.best_of or self.n) if self.use_beam_search else 1
