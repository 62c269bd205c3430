"""Text normalisers, by name and version: a rate is only comparable under the same one."""

import unicodedata
from collections.abc import Callable

from serve.errors import ConfigError

DEFAULT = "basic-v1"


def _raw(text: str) -> str:
    return " ".join(text.split())


def _basic_v1(text: str) -> str:
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if category == "Pd":  # dashes join words that other writers set apart
            kept.append(" ")
        elif not category.startswith("P"):
            kept.append(character)
    return _raw("".join(kept))


NORMALIZERS: dict[str, Callable[[str], str]] = {"basic-v1": _basic_v1, "raw": _raw}

DESCRIPTIONS = {
    "basic-v1": "Unicode NFKC, case folded, dashes to spaces, other punctuation removed, "
    "whitespace collapsed; numbers and accents stay as written",
    "raw": "as written, whitespace collapsed",
}


def normalizer(name: str) -> Callable[[str], str]:
    """The normaliser of that name.

    Raises:
        ConfigError: there is none; the message lists those that exist.
    """
    if name not in NORMALIZERS:
        raise ConfigError(f"unknown normaliser {name!r}; known: {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]
