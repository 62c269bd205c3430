"""Drop hallucinated segments: words of unlikely length and probability, surrounded by silence.

In silence a decoder may hallucinate a sentence, which its words reveal by duration and
probability. The rule and its numbers are those of `hallucination_silence_threshold` in OpenAI's
`whisper/transcribe.py` and in faster-whisper. Those decode again from the start of such a segment;
here only that segment is dropped. Pure functions; all times are those of the recording.
"""

import itertools
from collections.abc import Sequence

from serve.contract.messages import Segment, Word
from serve.speech.features import WINDOW_S
from serve.speech.windows import DecodedWindow
from serve.speech.word_parts import PUNCTUATION

_UNLIKELY = 0.15  # a word of lower probability scores 1
_SHORTEST_S = 0.133  # a shorter word scores `_SHORTNESS` per missing second
_SHORTNESS = 15
_LONGEST_S = 2.0  # a longer word scores 1 per additional second
_FIRST_WORDS = 8  # number of words of a segment that are scored
_ODD = 3.0  # minimum score of an anomalous segment; with fewer words, 1 per word
_EDGE_S = 2.0  # a segment this close to an edge of the window counts as touching it


def is_odd(segment: Segment) -> bool:
    """Return whether a segment's words are too unlikely, short or long; it must have words."""
    words = [word for word in segment.words or () if word.word not in PUNCTUATION]
    score = sum(map(_oddness, words[:_FIRST_WORDS]))
    return bool(segment.words) and score >= min(_ODD, len(words) - 0.01)


def _oddness(word: Word) -> float:
    duration_s = word.end - word.start
    short_s, long_s = max(0.0, _SHORTEST_S - duration_s), max(0.0, duration_s - _LONGEST_S)
    return float(word.probability < _UNLIKELY) + _SHORTNESS * short_s + long_s


def without_hallucinations(
    segments: Sequence[Segment], window: DecodedWindow, spoken_until_s: float, threshold_s: float
) -> list[Segment]:
    """Drop anomalous segments after silence and before silence or another anomalous segment.

    Args:
        segments: the segments of a window, in order, with their words.
        window: the window.
        spoken_until_s: the end of the last word before this window.
        threshold_s: a longer time without words is silence.
    """
    begin_s = window.timeline.start(0.0)
    end_s, full_s = window.timeline.end(window.duration_s), window.timeline.end(WINDOW_S)
    spoken = [segment for segment in segments if segment.words]
    made_up: list[Segment] = []
    for segment, following in itertools.zip_longest(spoken, spoken[1:]):
        next_s = following.words[0].start if following and following.words else end_s
        silent_before = (
            segment.start - spoken_until_s > threshold_s
            or segment.start < threshold_s
            or segment.start - begin_s < _EDGE_S
        )
        silent_after = (
            next_s - segment.end > threshold_s
            or full_s - segment.end < _EDGE_S
            or (following is not None and is_odd(following))
        )
        if silent_before and silent_after and is_odd(segment):
            made_up.append(segment)
        else:
            spoken_until_s = segment.end
    return [segment for segment in segments if segment not in made_up]
