"""Texts as they are compared: what speech does not tell is left out."""

import unicodedata


def bare(text: str) -> str:
    """Normalise a text by NFKC, without case and punctuation, its words one blank apart.

    Numbers and accents stay as they are written. Of `eval` it is the normaliser basic-v1.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if category == "Pd":  # dashes join words that other writers set apart
            kept.append(" ")
        elif not category.startswith("P"):
            kept.append(character)
    return " ".join("".join(kept).split())
