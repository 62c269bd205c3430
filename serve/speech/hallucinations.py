"""Segments that nobody said: words of unlikely length and probability, with silence around them.

A decoder that hears nothing may make up a sentence. Its words give it away once they are timed. The
rule and its numbers are those of `hallucination_silence_threshold` in OpenAI's
`whisper/transcribe.py`, which faster-whisper follows too, with one difference: they decode once
more from where such a segment began, for they decode a recording from left to right. Here it is
left out, and no other with it. Pure functions; all times are those of the whole audio.
"""

import itertools
from collections.abc import Sequence

from serve.contract.messages import Segment, Word
from serve.speech.features import WINDOW_S
from serve.speech.windows import Decoded
from serve.speech.word_parts import PUNCTUATION

_UNLIKELY = 0.15  # a word of lower probability is odd
_SHORTEST_S = 0.133  # shorter: odder by `_SHORTNESS` a second
_SHORTNESS = 15
_LONGEST_S = 2.0  # longer: odder by 1 a second
_FIRST_WORDS = 8  # of a segment decide
_ODD = 3.0  # so much in all makes a segment odd, or 1 a word
_EDGE_S = 2.0  # so near to an end of a window of 30 s, nothing lies between them


def is_odd(segment: Segment) -> bool:
    """Tell whether its words are too unlikely, short or long; it is not without words."""
    words = [word for word in segment.words or () if word.word not in PUNCTUATION]
    score = sum(map(_oddness, words[:_FIRST_WORDS]))
    return bool(segment.words) and score >= min(_ODD, len(words) - 0.01)


def _oddness(word: Word) -> float:
    duration_s = word.end - word.start
    short_s, long_s = max(0.0, _SHORTEST_S - duration_s), max(0.0, duration_s - _LONGEST_S)
    return float(word.probability < _UNLIKELY) + _SHORTNESS * short_s + long_s


def without_hallucinations(
    segments: Sequence[Segment], window: Decoded, spoken_until_s: float, threshold_s: float
) -> list[Segment]:
    """Leave out odd segments that have silence before them, and after them silence or an odd one.

    Args:
        segments: of a window, in order, with their words.
        window: whose they are.
        spoken_until_s: where the words before this window end.
        threshold_s: for longer without words is silence.
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
