"""What a window's job sampled, as an attempt that can be judged."""

from serve.contract.messages import Alignment
from serve.runtime.protocol import Scores
from serve.speech.judging import compression_ratio
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import Attempt, split_segments


def attempt_of(
    tokens: tuple[int, ...],
    scores: Scores,
    tokenizer: Tokenizer,
    duration_s: float,
    temperature: float,
    alignment: Alignment | None,
    looped: bool,
) -> Attempt:
    """Make an attempt of what was sampled of a window of `duration_s` at a temperature."""
    pieces = split_segments(tokens, tokenizer.facts, duration_s)
    return Attempt(
        tokens=tokens,
        pieces=tuple(pieces),
        avg_logprob=scores.avg_logprob,
        no_speech_prob=scores.no_speech_prob,
        temperature=temperature,
        # A loop of a sentence's length does not show in half a minute of text.
        compression_ratio=max(
            compression_ratio(tokenizer.decode(text))
            for text in (tokens, *(piece.tokens for piece in pieces))
        ),
        looped=looped,
        alignment=alignment,
    )
