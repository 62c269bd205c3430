"""List Whisper's languages as in OpenAI's `whisper/tokenizer.py`, with their alternative names."""

import re

# Entries: code, English name, other names; _ stands for a space within a name.
_NAMES = """
    en english, zh chinese mandarin, de german, es spanish castilian, ru russian, ko korean,
    fr french, ja japanese, pt portuguese, tr turkish, pl polish, ca catalan valencian,
    nl dutch flemish, ar arabic, sv swedish, it italian, id indonesian, hi hindi, fi finnish,
    vi vietnamese, he hebrew, uk ukrainian, el greek, ms malay, cs czech,
    ro romanian moldavian moldovan, da danish, hu hungarian, ta tamil, no norwegian, th thai,
    ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh,
    sk slovak, te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani,
    sl slovenian, kn kannada, et estonian, mk macedonian, br breton, eu basque, is icelandic,
    hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh, sq albanian, sw swahili,
    gl galician, mr marathi, pa punjabi panjabi, si sinhala sinhalese, km khmer, sn shona,
    yo yoruba, so somali, af afrikaans, oc occitan, ka georgian, be belarusian, tg tajik,
    sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao, uz uzbek, fo faroese,
    ht haitian_creole haitian, ps pashto pushto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit,
    lb luxembourgish letzeburgesch, my myanmar burmese, bo tibetan, tl tagalog, mg malagasy,
    as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir, jw javanese,
    su sundanese, yue cantonese
"""
_WORDS = [entry.split() for entry in _NAMES.split(",")]

LANGUAGE_NAMES: dict[str, str] = {code: name.replace("_", " ") for code, name, *_ in _WORDS}
"""Whisper's 100 languages in the order of the tokens: code -> English name."""

TO_LANGUAGE_CODE: dict[str, str] = {
    word.replace("_", " "): code for code, *names in _WORDS for word in (code, *names)
}
"""Every code and every English name, in lower case -> code."""

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
