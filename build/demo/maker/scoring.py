"""Character and word error rates over many pairs, with a plain normaliser."""

import re
import unicodedata
from collections.abc import Sequence

import jiwer

_DROPPED = re.compile(r"[^\w\s']|_")
_SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Lower case, hyphens and punctuation to spaces (apostrophes stay), single spaces, NFC."""
    text = unicodedata.normalize("NFC", text).lower()
    return _SPACES.sub(" ", _DROPPED.sub(" ", text)).strip()


def error_rate(pairs: Sequence[tuple[str, str]], words: bool = False) -> float:
    """Edits over the references' length, of (reference, hypothesis) pairs; by words if asked.

    0 where there is nothing to compare; what is said to an empty reference counts as edits.
    """
    if not pairs:
        return 0.0
    references, hypotheses = (list(texts) for texts in zip(*pairs, strict=True))
    process = jiwer.process_words if words else jiwer.process_characters
    found = process(references, hypotheses)
    edits = found.substitutions + found.deletions + found.insertions
    length = found.hits + found.substitutions + found.deletions
    return float(edits / max(length, 1))
