"""List Whisper's languages with their names, and convert Chinese scripts.

OpenCC chooses Chinese characters by the phrases around them. Conversions here keep the number of
characters, so that the boundaries of words and tokens do not move.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import opencc

from serve.contract.messages import Segment, TokenLogprob, Word

T = TypeVar("T", Word, TokenLogprob)

# The languages of OpenAI's `whisper/tokenizer.py` in the order of the tokens: Whisper's code,
# English names, and the ISO 639-2 codes that video files use.
_ROWS = [
    (code, names.split("|"), iso_codes.split("|"))
    for line in Path(__file__).with_name("languages.csv").read_text("utf-8").splitlines()[1:]
    for code, names, iso_codes in [line.split(",")]
]

LANGUAGE_NAMES: dict[str, str] = {code: names[0] for code, names, _ in _ROWS}
"""Whisper's 100 languages in the order of the tokens: code -> English name."""

TO_LANGUAGE_CODE: dict[str, str] = {
    name: code for code, names, _ in _ROWS for name in (code, *names)
}
"""Every code and every English name, in lower case -> code."""

FROM_ISO_639_2 = {iso: code for code, _, iso_codes in _ROWS for iso in iso_codes}
"""ISO 639-2 code, terminological or bibliographic -> code."""

_AUTO = "auto"
# Locales with language, script and region: en-US, pt_BR, zh-Hans-CN.
_TAG = re.compile(r"([a-z]{2,3})([-_][a-z0-9]{1,8}){0,4}")
# ISO 639 codes for which Whisper has another code.
_OTHER_CODES = {"nb": "no", "jv": "jw", "iw": "he", "in": "id", "cmn": "zh", "fil": "tl"}
_MAX_CHARS = 64

# Languages that Whisper confuses within one speaker's recording.
_CLOSE = ("bs hr sr", "da nn no", "hi ur", "id ms", "yue zh", "cs sk", "es gl", "be ru uk", "bg mk")
CLOSE_LANGUAGES = tuple(frozenset(codes.split()) for codes in _CLOSE)
"""Sets of codes of languages that are close to each other."""


def are_close(code: str, other: str) -> bool:
    """Return whether two languages are equal or close to each other."""
    return code == other or any({code, other} <= codes for codes in CLOSE_LANGUAGES)


def language_code(text: str) -> str | None:
    """Return Whisper's code of a language; None if there is none.

    Args:
        text: a code or an English name, in any case, or a BCP 47 tag (its first part is used).
    """
    key = text[:_MAX_CHARS].strip().lower()
    if key in TO_LANGUAGE_CODE:
        return TO_LANGUAGE_CODE[key]
    tag = _TAG.fullmatch(key)
    first = tag[1] if tag else ""
    code = _OTHER_CODES.get(first, first)
    return code if code in LANGUAGE_NAMES else None


def named_language(text: str | None) -> str | None:
    """Return the language that a request names; None if it must be detected, as for "auto"."""
    return None if isinstance(text, str) and text.strip().lower() == _AUTO else text


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
    simplified, traditional = _count_script_chars(text)
    if not simplified and not traditional:
        return None
    return "Hant" if traditional > simplified else "Hans"


def convert(text: str, script: Script) -> str:
    """Convert a text to a script without changing its number of characters.

    If the text is already mostly in the script, only characters that the script lacks are replaced:
    后 may stand for 後 in simplified, but not in traditional Chinese.
    """
    simplified, traditional = _count_script_chars(text)
    in_other_script = traditional if script == "Hans" else simplified
    in_this_script = simplified if script == "Hans" else traditional
    if not in_other_script and (in_this_script or script == "Hans"):
        return text
    converted = _converted(text, script)
    if in_this_script <= in_other_script:
        return converted
    charset = _SIMPLIFIED if script == "Hans" else _TRADITIONAL
    return "".join(
        other if _is_han(char) and not _is_encodable(charset, char) else char
        for char, other in zip(text, converted, strict=True)
    )


def rewrite(segment: Segment, script: Script) -> Segment:
    """Convert a segment's text, words and scored tokens to a script."""
    text = convert(segment.text, script)
    if text == segment.text:
        return segment
    return dataclasses.replace(
        segment,
        text=text,
        words=_with_parts_of(text, segment.words, "word"),
        token_logprobs=_with_parts_of(text, segment.token_logprobs, "token"),
    )


def _with_parts_of(text: str, items: Sequence[T] | None, field: str) -> tuple[T, ...] | None:
    """Replace the texts of words or tokens by the parts of a converted text of the same length."""
    if items is None:
        return None
    converted, offset = list[T](), 0
    for item in items:
        begin, offset = offset, offset + len(getattr(item, field))
        change: dict[str, Any] = {field: text[begin:offset]}
        converted.append(dataclasses.replace(item, **change))
    return tuple(converted)


def _count_script_chars(text: str) -> Sequence[int]:
    """Count the characters that exist only in simplified, and only in traditional Chinese."""
    encodable = [
        (_is_encodable(_SIMPLIFIED, char), _is_encodable(_TRADITIONAL, char))
        for char in text
        if _is_han(char)
    ]
    return encodable.count((True, False)), encodable.count((False, True))


def _is_han(char: str) -> bool:
    return "\u3400" <= char <= "\u9fff"


@functools.lru_cache(2**15)
def _is_encodable(charset: str, char: str) -> bool:
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
