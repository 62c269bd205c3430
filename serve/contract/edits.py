"""The edit distance of two texts, for the shadow monitor and for the check of a new engine."""


def char_edits(expected: str, text: str) -> int:
    """Return the Levenshtein distance of two normalized texts, in characters; spaces count."""
    import jiwer  # noqa: PLC0415 - few processes compare texts

    if not expected:  # jiwer takes no empty reference
        return len(text)
    out = jiwer.process_characters(expected, text)
    return int(out.substitutions + out.deletions + out.insertions)
