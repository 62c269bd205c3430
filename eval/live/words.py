"""The times at which words of a stream became final, held against when they were said. Pure."""

import dataclasses
from collections.abc import Iterable, Sequence

from eval.accuracy.normalize import Normalize
from eval.accuracy.score import in_common


@dataclasses.dataclass(frozen=True)
class Final:
    """A word that became final, at a time of its stream."""

    text: str
    at_s: float


@dataclasses.dataclass(frozen=True)
class Spoken:
    """A word with the time at which it ends in the audio."""

    text: str
    end_s: float


def final_words(deltas: Iterable[tuple[float, str]]) -> list[Final]:
    """Return the words of one utterance.

    A word counts as there with the last of its letters; a mark may follow it later.

    Args:
        deltas: times and texts, in order.
    """
    times, text = list[float](), ""
    for at_s, delta in deltas:
        text += delta
        times += [at_s] * len(delta)
    words, begin = list[Final](), 0
    for word in text.split():
        begin = text.index(word, begin)
        letters = [i for i, character in enumerate(word) if character.isalnum()] or [0]
        words.append(Final(word, times[begin + letters[-1]]))
        begin += len(word)
    return words


def latencies(
    final: Sequence[Final], spoken: Sequence[Spoken], normalize: Normalize, language: str | None
) -> list[float]:
    """Measure the seconds from the end of each word in the audio to its final text.

    Words that were heard otherwise than they are known to have been said tell nothing.
    """
    mine = [normalize(word.text, language) for word in final]
    theirs = [normalize(word.text, language) for word in spoken]
    return [final[i].at_s - spoken[j].end_s for i, j in in_common(mine, theirs)]
