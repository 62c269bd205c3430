"""Judge attempts: accept them, call them silence, or decode again; choose the best failed one.

The rules follow OpenAI's `whisper/transcribe.py`. Pure functions.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Literal

from serve.contract.config import TranscriberConfig
from serve.speech.windows import Attempt

_HARDLY_SPOKEN_S = 0.5  # with less speech, the model's no-speech probability alone decides
LOOP_START = 16  # tokens of the repeated words and of zlib's constant overhead

_PLAIN_RATIO = 1.56  # lowest compression ratio measured on 600 bytes of plain text
_TOKENS_PER_S = 8  # maximum speech rate


@dataclasses.dataclass(frozen=True)
class AttemptDecision:
    """The decision on an attempt."""

    outcome: Literal["accept", "silence", "retry", "give up"]
    temperature: float | None = None  # of the next attempt, with "retry"


def compression_ratio(text: str) -> float:
    """Return UTF-8 bytes divided by zlib bytes: high for repetitive text, 0 for no text."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def loop_tokens(max_tokens: int, duration_s: float, threshold: float) -> int:
    """Return how many repeated tokens make a whole window repetitive.

    If r of a window's n tokens are repetitions, its compression ratio is about that of plain text
    times n / (n - r), whatever follows. The speech rate limits n, too.

    Args:
        max_tokens: the maximum number of sampled tokens.
        duration_s: seconds of the window's audio.
        threshold: compression ratio above which a window is repetitive.

    Returns:
        At least `LOOP_START`; 0 if no number of repetitions suffices.
    """
    new = _PLAIN_RATIO / max(threshold, _PLAIN_RATIO)
    if max_tokens * new < LOOP_START:
        return 0
    most = min(max_tokens, LOOP_START + _TOKENS_PER_S * duration_s)
    return LOOP_START + round(most * (1 - new))


def decide(
    attempt: Attempt,
    config: TranscriberConfig,
    fixed_temperature: bool,
    voice_s: float | None = None,
) -> AttemptDecision:
    """Accept an attempt, call it silence, or retry it at the next higher temperature.

    It is silence if the no-speech probability is high and either the text is uncertain or VAD found
    hardly any speech. The latter catches a hallucinated "Thank you.", which the model is certain
    of. An attempt that was ended as a loop, but is not repetitive, continues at the same
    temperature. Scores that are None skip their check. With a fixed temperature the attempt is
    final. After the highest temperature the verdict is "give up"; see `best_attempt`.

    Args:
        attempt: the attempt.
        config: the thresholds.
        fixed_temperature: whether the client fixed the temperature.
        voice_s: seconds of speech in the window; None if VAD did not run.
    """
    repetitive = attempt.compression_ratio > config.compression_ratio_threshold
    if attempt.looped and not repetitive:
        return AttemptDecision("retry", attempt.temperature)
    unsure = attempt.avg_logprob is not None and attempt.avg_logprob < config.logprob_threshold
    hardly_spoken = voice_s is not None and voice_s < _HARDLY_SPOKEN_S
    if (
        attempt.no_speech_prob is not None
        and attempt.no_speech_prob > config.no_speech_threshold
        and (unsure or attempt.avg_logprob is None or hardly_spoken)
    ):
        return AttemptDecision("silence")
    if fixed_temperature or not (unsure or repetitive):
        return AttemptDecision("accept")
    higher = [t for t in config.temperatures if t > attempt.temperature]
    return AttemptDecision("retry", min(higher)) if higher else AttemptDecision("give up")


def best_attempt(attempts: Sequence[Attempt], config: TranscriberConfig) -> Attempt:
    """Return the most likely of a window's attempts if none was accepted.

    As in faster-whisper's `generate_with_fallback`, attempts that are not repetitive are preferred.
    If the runtime returns no log-probability, the attempt at the lowest temperature is chosen.

    Args:
        attempts: at least one attempt, in order.
        config: has the compression ratio threshold.
    """
    limit = config.compression_ratio_threshold
    plain = [attempt for attempt in attempts if attempt.compression_ratio <= limit]
    return max(plain or attempts, key=_likelihood)


def _likelihood(attempt: Attempt) -> float:
    return -math.inf if attempt.avg_logprob is None else attempt.avg_logprob
