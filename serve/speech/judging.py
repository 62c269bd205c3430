"""Judge a window's text: accept it, call it silence, or decode again. Pure functions.

The rules follow OpenAI's `whisper/transcribe.py`.

In silence a decoder may hallucinate a sentence. Its words have unusual durations and probabilities.
The rule and its numbers are those of `hallucination_silence_threshold` in OpenAI's
`whisper/transcribe.py` and in faster-whisper. These decode again from the start of such a segment;
here only the segment is dropped.

The calibration in an engine's manifest gives the confidence of words.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Literal

from serve.contract.config import TranscriberConfig
from serve.contract.manifest import Confidence
from serve.contract.messages import Segment, Word
from serve.speech.features import WINDOW_S
from serve.speech.windows import Attempt, DecodedWindow
from serve.speech.words import PUNCTUATION

_MIN_SPEECH_S = 0.5  # with less speech, the model's no-speech probability alone decides
LOOP_START = 16  # tokens: the words that then repeat, and zlib's constant overhead

_PLAIN_TEXT_RATIO = 1.56  # lowest compression ratio measured on 600 bytes of plain text
_MAX_TOKENS_PER_S = 8  # maximum speech rate


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

    If r of a window's n tokens are repetitions, its compression ratio is about n / (n - r) times
    that of plain text, even if the other tokens are all new. The speech rate limits n, too.

    Args:
        max_tokens: the maximum number of sampled tokens.
        duration_s: seconds of the window's audio.
        threshold: compression ratio above which a window is repetitive.

    Returns:
        At least `LOOP_START`; 0 if no number of repetitions suffices.
    """
    share_new = _PLAIN_TEXT_RATIO / max(threshold, _PLAIN_TEXT_RATIO)
    if max_tokens * share_new < LOOP_START:
        return 0
    max_text_tokens = min(max_tokens, LOOP_START + _MAX_TOKENS_PER_S * duration_s)
    return LOOP_START + round(max_text_tokens * (1 - share_new))


def decide(
    attempt: Attempt,
    config: TranscriberConfig,
    fixed_temperature: bool,
    voice_s: float | None = None,
) -> AttemptDecision:
    """Accept an attempt, call it silence, or retry it at the next higher temperature.

    An attempt is silence if the no-speech probability is high and either the text is uncertain or
    VAD found hardly any speech. The latter catches a hallucinated "Thank you.", of which the model
    is certain. An attempt that was ended as a loop, but is not repetitive, continues at the same
    temperature. A score of None skips its check. With a fixed temperature the attempt is final.
    After the highest temperature the decision is "give up"; see `best_attempt`.

    Args:
        attempt: the attempt.
        config: the thresholds.
        fixed_temperature: whether the client fixed the temperature.
        voice_s: seconds of speech in the window; None if VAD did not run.
    """
    repetitive = attempt.compression_ratio > config.compression_ratio_threshold
    if attempt.looped and not repetitive:
        return AttemptDecision("retry", attempt.temperature)
    uncertain = attempt.avg_logprob is not None and attempt.avg_logprob < config.logprob_threshold
    little_speech = voice_s is not None and voice_s < _MIN_SPEECH_S
    if (
        attempt.no_speech_prob is not None
        and attempt.no_speech_prob > config.no_speech_threshold
        and (uncertain or attempt.avg_logprob is None or little_speech)
    ):
        return AttemptDecision("silence")
    if fixed_temperature or not (uncertain or repetitive):
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
    not_repetitive = [attempt for attempt in attempts if attempt.compression_ratio <= limit]
    no_score = -math.inf
    return max(
        not_repetitive or attempts,
        key=lambda attempt: no_score if attempt.avg_logprob is None else attempt.avg_logprob,
    )


_MIN_WORD_PROB = 0.15  # a word of lower probability scores 1
_MIN_WORD_S = 0.133  # a shorter word scores `_SHORT_PENALTY_PER_S` per missing second
_SHORT_PENALTY_PER_S = 15
_MAX_WORD_S = 2.0  # a longer word scores 1 per additional second
_N_SCORED_WORDS = 8  # number of words of a segment that are scored
_MIN_ANOMALY_SCORE = 3.0  # of an anomalous segment; with fewer than 3 words, 1 per word
_MAX_EDGE_DISTANCE_S = 2.0  # a segment this close to an edge of the window counts as touching it


def is_anomalous(segment: Segment) -> bool:
    """Return whether a segment has words that are too unlikely, short or long."""
    words = [word for word in segment.words or () if word.word not in PUNCTUATION]
    score = sum(map(_anomaly_score, words[:_N_SCORED_WORDS]))
    return bool(segment.words) and score >= min(_MIN_ANOMALY_SCORE, len(words) - 0.01)


def _anomaly_score(word: Word) -> float:
    duration_s = word.end - word.start
    short_s, long_s = max(0.0, _MIN_WORD_S - duration_s), max(0.0, duration_s - _MAX_WORD_S)
    return float(word.probability < _MIN_WORD_PROB) + _SHORT_PENALTY_PER_S * short_s + long_s


def without_hallucinations(
    segments: Sequence[Segment], window: DecodedWindow, spoken_until_s: float, threshold_s: float
) -> list[Segment]:
    """Drop an anomalous segment if silence precedes it, and silence or another one follows it.

    Args:
        segments: the segments of a window, in order, with their words.
        window: the window.
        spoken_until_s: the end of the last word before this window.
        threshold_s: a longer time without words is silence.
    """
    begin_s = window.timeline.start(0.0)
    end_s, full_end_s = window.timeline.end(window.duration_s), window.timeline.end(WINDOW_S)
    spoken = [segment for segment in segments if segment.words]
    hallucinated: list[Segment] = []
    for segment, following in itertools.zip_longest(spoken, spoken[1:]):
        next_s = following.words[0].start if following and following.words else end_s
        silent_before = (
            segment.start - spoken_until_s > threshold_s
            or segment.start < threshold_s
            or segment.start - begin_s < _MAX_EDGE_DISTANCE_S
        )
        silent_after = (
            next_s - segment.end > threshold_s
            or full_end_s - segment.end < _MAX_EDGE_DISTANCE_S
            or (following is not None and is_anomalous(following))
        )
        if silent_before and silent_after and is_anomalous(segment):
            hallucinated.append(segment)
        else:
            spoken_until_s = segment.end
    return [segment for segment in segments if segment not in hallucinated]


_MIN_PROB = 1e-3  # probabilities are clipped to [_MIN_PROB, 1 - _MIN_PROB]


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)) of a probability, clipped away from 0 and 1."""
    clipped = min(max(probability, _MIN_PROB), 1 - _MIN_PROB)
    return math.log(clipped / (1 - clipped))


def confidence_of(fit: Confidence, probability: float, avg_logprob: float) -> float:
    """Return the probability, from 0 to 1, that a word is correct.

    Args:
        fit: the engine's calibration.
        probability: the word's probability, as in the answer.
        avg_logprob: the segment's average log-probability.
    """
    word_term = fit.probability * log_odds(probability)
    return (1 + math.tanh((fit.intercept + word_term + fit.avg_logprob * avg_logprob) / 2)) / 2


def with_confidence(
    segments: Sequence[Segment], fit: Confidence | None, low: float | None
) -> list[Segment]:
    """Return segments with the words' confidence; words below `low` are marked.

    Without a calibration, words or `avg_logprob`, segments are returned unchanged.
    """
    judged = list[Segment]()
    for segment in segments:
        if fit is not None and segment.words is not None and segment.avg_logprob is not None:
            words = list[Word]()
            for word in segment.words:
                value = round(confidence_of(fit, word.probability, segment.avg_logprob), 4)
                marked = True if low is not None and value < low else None
                words.append(dataclasses.replace(word, confidence=value, low_confidence=marked))
            segment = dataclasses.replace(segment, words=tuple(words))
        judged.append(segment)
    return judged
