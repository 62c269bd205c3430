"""Normalise texts for comparison."""

import unicodedata


def normalize_text(text: str) -> str:
    """Normalise a text: NFKC, no case, no punctuation, single spaces between words.

    Numbers and accents do not change. `eval` calls this normaliser basic-v1.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if category == "Pd":  # words may be written with a dash or with a space between them
            kept.append(" ")
        elif not category.startswith("P"):
            kept.append(character)
    return " ".join("".join(kept).split())
