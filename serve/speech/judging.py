"""Judgement of attempts: accepted, silence or decoded again; and which of bad ones is the best.

The rules follow OpenAI's `whisper/transcribe.py`. Pure functions.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Literal

from serve.contract.config import TranscriberConfig
from serve.speech.windows import Attempt

_HARDLY_SPOKEN_S = 0.5  # of voice: with less, whether there are words is the model's to say
LOOP_START = 16  # tokens: the words that are repeated, and what compressing needs in any case

_PLAIN_RATIO = 1.56  # compression ratio of 600 bytes of plain text, the lower end of what was seen
_TOKENS_PER_S = 8  # nobody speaks faster


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision on an attempt."""

    outcome: Literal["accept", "silence", "retry", "give up"]
    temperature: float | None = None  # of the next attempt, with "retry"


def compression_ratio(text: str) -> float:
    """Divide bytes of UTF-8 by bytes after zlib: high for text that repeats itself, 0 for none."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def loop_tokens(max_tokens: int, duration_s: float, threshold: float) -> int:
    """Count the tokens, repeating those before them, that make a whole window repetitive.

    Of a window of n tokens of which r say nothing new the rest compresses as any text: the ratio of
    the whole is about that of plain text times n / (n - r), whatever follows. n is bounded by what
    can be said in the window's time, too.

    Args:
        max_tokens: the most that may be sampled.
        duration_s: of the window's audio.
        threshold: compression ratio above which a window is repetitive.

    Returns:
        At least `LOOP_START`; 0 where no loop would be enough.
    """
    new = _PLAIN_RATIO / max(threshold, _PLAIN_RATIO)
    if max_tokens * new < LOOP_START:
        return 0
    most = min(max_tokens, LOOP_START + _TOKENS_PER_S * duration_s)
    return LOOP_START + round(most * (1 - new))


def judge(
    attempt: Attempt,
    config: TranscriberConfig,
    fixed_temperature: bool,
    voice_s: float | None = None,
) -> Verdict:
    """Accept an attempt, call it silence, or ask for another at the next higher temperature.

    It is silence where the model says so and either is unsure of the text or hardly a voice is
    heard: of a "Thank you." that nobody said it is sure. An attempt that was ended as a loop but
    does not compress as such goes on: the same temperature again. Scores that are None skip their
    check. Where the client fixed the temperature, the attempt stands as it is. After the highest
    one there is nothing left to try; see `best_attempt`.

    Args:
        attempt: of a window.
        config: the thresholds.
        fixed_temperature: by the client.
        voice_s: seconds of the window in which somebody speaks; None: nobody listened.
    """
    repetitive = attempt.compression_ratio > config.compression_ratio_threshold
    if attempt.looped and not repetitive:
        return Verdict("retry", attempt.temperature)
    unsure = attempt.avg_logprob is not None and attempt.avg_logprob < config.logprob_threshold
    hardly_spoken = voice_s is not None and voice_s < _HARDLY_SPOKEN_S
    if (
        attempt.no_speech_prob is not None
        and attempt.no_speech_prob > config.no_speech_threshold
        and (unsure or attempt.avg_logprob is None or hardly_spoken)
    ):
        return Verdict("silence")
    if fixed_temperature or not (unsure or repetitive):
        return Verdict("accept")
    higher = [t for t in config.temperatures if t > attempt.temperature]
    return Verdict("retry", min(higher)) if higher else Verdict("give up")


def best_attempt(attempts: Sequence[Attempt], config: TranscriberConfig) -> Attempt:
    """Choose the likeliest of a window's attempts, of which none was accepted.

    As in faster-whisper's `generate_with_fallback`: those that do not repeat themselves go first.
    Where the runtime tells no log-probability, it is the one at the lowest temperature.

    Args:
        attempts: at least one, in order.
        config: for the threshold of repetition.
    """
    limit = config.compression_ratio_threshold
    plain = [attempt for attempt in attempts if attempt.compression_ratio <= limit]
    return max(plain or attempts, key=_likelihood)


def _likelihood(attempt: Attempt) -> float:
    return -math.inf if attempt.avg_logprob is None else attempt.avg_logprob
