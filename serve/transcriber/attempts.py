"""Choose the decoding options of an attempt at a window, and describe its result."""

import dataclasses

from serve.contract.messages import Alignment
from serve.runtime.protocol import DecodingOptions, Scores
from serve.speech.judging import compression_ratio
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import Attempt, split_segments

_SEEDS_PER_WINDOW = 1000


def options_at(options: DecodingOptions, number: int, temperature: float) -> DecodingOptions:
    """Return a window's options at a temperature: beam search at 0, `best_of` samples above.

    The seed depends only on the window's number and the temperature. The same request therefore
    gets the same answer, independent of the requests beside it.
    """
    seed = number * _SEEDS_PER_WINDOW + round(temperature * (_SEEDS_PER_WINDOW - 1))
    options = dataclasses.replace(options, temperature=temperature, seed=seed)
    if temperature > 0:
        return dataclasses.replace(options, beam_size=1)
    return dataclasses.replace(options, best_of=1)


def attempt_of(
    tokens: tuple[int, ...],
    scores: Scores,
    tokenizer: Tokenizer,
    duration_s: float,
    temperature: float,
    alignment: Alignment | None,
    looped: bool,
) -> Attempt:
    """Build an attempt from the tokens sampled for a window of `duration_s` seconds."""
    pieces = split_segments(tokens, tokenizer.facts, duration_s)
    return Attempt(
        tokens=tokens,
        pieces=tuple(pieces),
        avg_logprob=scores.avg_logprob,
        no_speech_prob=scores.no_speech_prob,
        temperature=temperature,
        # One looping sentence hardly changes the ratio of 30 seconds of text: check each segment.
        compression_ratio=max(
            compression_ratio(tokenizer.decode(text))
            for text in (tokens, *(piece.tokens for piece in pieces))
        ),
        looped=looped,
        alignment=alignment,
    )
