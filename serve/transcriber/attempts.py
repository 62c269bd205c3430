"""Attempts at a window: with which options its job samples, and what it sampled, to be judged."""

import dataclasses

from serve.contract.messages import Alignment
from serve.runtime.protocol import DecodingOptions, Scores
from serve.speech.judging import compression_ratio
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import Attempt, split_segments

_SEEDS_PER_WINDOW = 1000


def options_at(options: DecodingOptions, number: int, temperature: float) -> DecodingOptions:
    """Return a window's options at a temperature: a beam for 0, several samples for others.

    The seed depends on the window's number and the temperature alone, so the same request gets the
    same answer whenever and beside whatever it is sent.
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
