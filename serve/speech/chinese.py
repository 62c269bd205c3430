"""Detect Chinese scripts, and convert texts between them.

OpenCC chooses characters by the phrases around them. Conversions here keep the number of
characters, so that the boundaries of words and tokens do not move.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import opencc

from serve.contract.messages import Segment

Script = Literal["Hans", "Hant", "Hant-HK"]
"""Simplified, traditional (Taiwan), and traditional (Hong Kong)."""

_CONVERSIONS: dict[Script, str] = {"Hans": "t2s", "Hant": "s2tw", "Hant-HK": "s2hk"}
_REGIONS: dict[str, Script] = {
    **dict.fromkeys(("cn", "sg", "my"), "Hans"),
    **dict.fromkeys(("hk", "mo"), "Hant-HK"),
    "tw": "Hant",
}
_SIMPLIFIED, _TRADITIONAL = "gb2312", "big5"  # character sets with one script each


def script_of(tag: str) -> Script | None:
    """Return the Chinese script that a language tag such as zh-TW or zh-Hant names.

    Args:
        tag: a BCP 47 tag, in any case, with - or _.

    Returns:
        The script; None if the tag names another language, or neither script nor region.
    """
    language, *parts = re.split("[-_]", tag.strip().lower())
    if language not in ("zh", "cmn"):
        return None
    region = next((_REGIONS[part] for part in parts if part in _REGIONS), None)
    if "hans" in parts:
        return "Hans"
    if "hant" in parts:
        return "Hant-HK" if region == "Hant-HK" else "Hant"
    return region


def script_in(text: str) -> Script | None:
    """Return the prevailing script of a text; None if there is none."""
    simplified, traditional = _counts(text)
    if not simplified and not traditional:
        return None
    return "Hant" if traditional > simplified else "Hans"


def convert(text: str, script: Script) -> str:
    """Convert a text to a script without changing its number of characters.

    If the text is already mostly in the script, only characters that the script lacks are replaced:
    后 may stand for 後 in simplified, but not in traditional Chinese.
    """
    simplified, traditional = _counts(text)
    foreign = traditional if script == "Hans" else simplified
    own = simplified if script == "Hans" else traditional
    if not foreign and (own or script == "Hans"):
        return text
    converted = _converted(text, script)
    if own <= foreign:
        return converted
    lacks = _SIMPLIFIED if script == "Hans" else _TRADITIONAL
    return "".join(
        other if _is_han(char) and not _has(lacks, char) else char
        for char, other in zip(text, converted, strict=True)
    )


def rewrite(segment: Segment, script: Script) -> Segment:
    """Convert a segment's text, words and scored tokens to a script."""
    text = convert(segment.text, script)
    if text == segment.text:
        return segment
    words, scored = segment.words, segment.token_logprobs
    if words is not None:
        texts = _cut(text, [word.word for word in words])
        words = tuple(
            dataclasses.replace(word, word=part) for word, part in zip(words, texts, strict=True)
        )
    if scored is not None:
        texts = _cut(text, [piece.token for piece in scored])
        scored = tuple(
            dataclasses.replace(piece, token=part)
            for piece, part in zip(scored, texts, strict=True)
        )
    return dataclasses.replace(segment, text=text, words=words, token_logprobs=scored)


def _cut(text: str, parts: Iterable[str]) -> Iterator[str]:
    """Cut a converted text into parts with the lengths of the original parts."""
    at = 0
    for part in parts:
        yield text[at : at + len(part)]
        at += len(part)


def _counts(text: str) -> Sequence[int]:
    """Count the characters that exist only in simplified, and only in traditional Chinese."""
    sets = [(_has(_SIMPLIFIED, char), _has(_TRADITIONAL, char)) for char in text if _is_han(char)]
    return sets.count((True, False)), sets.count((False, True))


def _is_han(char: str) -> bool:
    return "\u3400" <= char <= "\u9fff"


@functools.lru_cache(2**15)
def _has(charset: str, char: str) -> bool:
    try:
        char.encode(charset)
    except UnicodeEncodeError:
        return False
    return True


def _converted(text: str, script: Script) -> str:
    converter = _converter(_CONVERSIONS[script])
    converted = str(converter.convert(text))
    if len(converted) == len(text):
        return converted
    singles = map(converter.convert, text)
    return "".join(
        other if len(other) == 1 else char for char, other in zip(text, singles, strict=True)
    )


@functools.cache
def _converter(name: str) -> opencc.OpenCC:
    """Load a conversion once, because loading takes 0.1 s."""
    return opencc.OpenCC(name)
