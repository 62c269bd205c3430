"""Find vowel signs and marks that belong to the letter before them."""

import unicodedata

# In Thai and Lao these vowels are separate characters before or after their consonant.
_VOWELS_BEFORE = frozenset("เแโใไເແໂໃໄ")
_VOWELS_BEHIND = frozenset("ะาำๅະາຳຽ")
_JOINERS = frozenset("\u1039\u17d2\u200d")  # for stacked Burmese and Khmer consonants; emoji


def is_joined(last: str, first: str) -> bool:
    """Return whether `first` belongs to the letter before it.

    Args:
        last: a character of a text.
        first: the character after it.
    """
    return (
        unicodedata.category(first).startswith("M")
        or first in _VOWELS_BEHIND
        or last in _VOWELS_BEFORE
        or last in _JOINERS
        or first in _JOINERS
    )
