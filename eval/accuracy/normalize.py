"""Text normalisers, by name and version: a rate is only comparable under the same one.

Whisper's own for English is taken from transformers. Its table of British and American spellings
comes with a checkpoint (`normalizer.json`); a run keeps a copy, so that scoring it again is the
same.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from eval.record import read_json
from serve.speech.text import normalize_text

DEFAULT = "basic-v1"
WHISPER = "whisper-english"
RAW = "raw"
NORMALIZERS = (DEFAULT, WHISPER, RAW)
SPELLING_FILE = "normalizer.json"  # as a Hugging Face checkpoint calls it

Normalize = Callable[[str, str | None], str]
"""Takes a text and its language's code, or None; returns the text to compare."""


@dataclasses.dataclass(frozen=True)
class Spelling:
    """American spellings by British ones."""

    words: dict[str, str] = dataclasses.field(default_factory=dict)


def read_spelling(folder: Path) -> Spelling:
    """Read a checkpoint's spelling file; without one, return an empty `Spelling`.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the file is not a table of words.
    """
    path = folder / SPELLING_FILE
    return Spelling(read_json(path, dict[str, str], "spellings")) if path.is_file() else Spelling()


def normalizer(name: str, spelling: Spelling | None = None) -> Normalize:
    """Return the normaliser of a name in `NORMALIZERS`; only `WHISPER` uses the spelling."""
    if name == WHISPER:
        return _whisper_english(spelling or Spelling())
    return {DEFAULT: _basic_v1, RAW: _raw}[name]


def _basic_v1(text: str, _language: str | None = None) -> str:
    return normalize_text(text)


def _raw(text: str, _language: str | None = None) -> str:
    return " ".join(text.split())


def _whisper_english(spelling: Spelling) -> Normalize:
    from transformers.models.whisper.english_normalizer import (  # noqa: PLC0415 - takes a second
        EnglishTextNormalizer,
    )

    # It is annotated nowhere, and takes any dict of words.
    english: Callable[[str], str] = EnglishTextNormalizer(spelling.words)  # type: ignore[no-untyped-call]

    @functools.lru_cache(maxsize=4096)  # a reference comes back with every system and pass
    def normalize(text: str, language: str | None) -> str:
        return _raw(english(text)) if language == "en" else _basic_v1(text)

    return normalize
