"""Character and word error rates over many pairs, with a plain normaliser."""

import re
import unicodedata
from collections.abc import Sequence

_DROPPED = re.compile(r"[^\w\s']|_")
_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Lower case, hyphens and punctuation to spaces (apostrophes stay), single spaces, NFC."""
    text = unicodedata.normalize("NFC", text).lower()
    return _SPACES.sub(" ", _DROPPED.sub(" ", text)).strip()


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein distance."""
    if one == other:
        return 0
    previous = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        current = [row]
        for column, right in enumerate(other, 1):
            change = previous[column - 1] + (left != right)
            current.append(min(change, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def error_rate(pairs: Sequence[tuple[str, str]], words: bool = False) -> float:
    """Edits over the references' length, of (reference, hypothesis) pairs; by words if asked."""
    edits = total = 0
    for reference, hypothesis in pairs:
        one = reference.split() if words else list(reference)
        other = hypothesis.split() if words else list(hypothesis)
        edits += distance(one, other)
        total += len(one)
    return edits / max(total, 1)
