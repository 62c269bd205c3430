"""Whose words are right: cpWER, the concatenated minimum-permutation word error rate. Pure.

All that a speaker says is one text, and so is all that a system says of one; they are paired so
that the edits are the fewest. Whoever has no partner has only errors. A character of writing
without spaces counts as a word.
"""

import collections
import re
from collections.abc import Iterable

import numpy as np

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import Counts, word_counts
from eval.speakers.score import best_pairs

Said = Iterable[tuple[str, str]]
"""Speakers and what they say, in order of time."""

_SPACELESS = re.compile(r"([\u3040-\u30ff\u3400-\u9fff])")
_normalize = normalizer(DEFAULT)


def cp_counts(reference: Said, hypothesis: Said) -> Counts:
    """Count the edits between what speakers say and what a system says of its speakers."""
    references, hypotheses = _by_speaker(reference), _by_speaker(hypothesis)
    size = max(len(references), len(hypotheses))
    references += [""] * (size - len(references))
    hypotheses += [""] * (size - len(hypotheses))
    counts = [[word_counts(text, other) for other in hypotheses] for text in references]
    errors = np.array([[pair.errors for pair in row] for row in counts], np.float64)
    pairs = best_pairs(-errors.reshape(size, size))
    return sum((counts[i][j] for i, j in pairs), Counts())


def counts_as_one(reference: Said, hypothesis: Said) -> Counts:
    """Count the edits between the words alone, whoever says them."""
    joined = (" ".join(text for _, text in texts) for texts in (reference, hypothesis))
    return word_counts(*map(_words, joined))


def _by_speaker(spoken: Said) -> list[str]:
    texts = collections.defaultdict[str, list[str]](list)
    for speaker, text in spoken:
        texts[speaker].append(text)
    return [_words(" ".join(own)) for own in texts.values()]


def _words(text: str) -> str:
    return " ".join(_SPACELESS.sub(r" \1 ", _normalize(text, None)).split())
