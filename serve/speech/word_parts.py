"""Split tokens into parts of words, and join the parts to words.

Times are measured for parts. They are split like the words of OpenAI's `whisper/timing.py`: at
spaces and at every punctuation mark. `whole_words` finally joins them to words, which start at
spaces.
"""

import dataclasses
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from serve.speech.scripts import is_joined

SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages written without spaces

Decode = Callable[[Sequence[int]], str]

_PREPENDED = "\"'“¿([{-"  # punctuation that belongs to the word after it
_APPENDED = "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the word before it
PUNCTUATION = _PREPENDED + _APPENDED
_SILENT = frozenset(PUNCTUATION + ";…")  # unspoken marks, as are dashes and brackets
_SILENT_CATEGORIES = frozenset({"Pd", "Ps", "Pe", "Pi", "Pf"})
_NO_BREAK = frozenset("\u00a0\u2007\u202f")  # spaces within a word


@dataclasses.dataclass
class WordTiming:
    """A word of a window, or a part of one; times count from the window's start."""

    text: str  # with a leading space; "" after it was joined to a neighbour
    tokens: int  # number of text tokens
    start_s: float
    end_s: float
    probabilities: npt.NDArray[np.float32]  # (n,), of the word's tokens without joined punctuation

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return self.end_s - self.start_s

    @property
    def probability(self) -> float:
        """The tokens' mean probability."""
        return float(self.probabilities.mean())


def split_words(
    tokens: Sequence[int], decode: Decode, language: str
) -> tuple[list[str], list[int]]:
    """Join text tokens to parts of words.

    A part starts at a space or, in languages without spaces, at every character. A punctuation
    mark that is a separate token is a separate part.

    Args:
        tokens: text tokens.
        decode: returns the text of tokens; invalid UTF-8 becomes U+FFFD.
        language: the language's code.

    Returns:
        The parts, and the number of tokens of each.
    """
    pieces = list(characters(tokens, decode))
    if language not in SPACELESS:
        pieces = list(_spaced(pieces))
    return [text for text, _ in pieces], [count for _, count in pieces]


def characters(tokens: Sequence[int], decode: Decode) -> Iterator[tuple[str, int]]:
    """Yield the text and number of tokens of the shortest runs that decode to whole characters."""
    whole, done, begin = decode(tokens), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        at = text.find("\ufffd")
        if at < 0 or whole[done + at : done + at + 1] == "\ufffd":
            yield text, end - begin
            begin, done = end, done + len(text)


def _spaced(pieces: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    text, count = "", 0
    for piece, tokens in pieces:
        begins = piece.startswith(" ") or piece.strip() in string.punctuation
        if begins and count:
            yield text, count
            text, count = "", 0
        text, count = text + piece, count + tokens
    if count:
        yield text, count


def join_punctuation(timings: list[WordTiming]) -> None:
    """Join punctuation to the adjacent words; the words' times do not change."""
    following = len(timings) - 1
    for i in range(len(timings) - 2, -1, -1):
        mark, word = timings[i], timings[following]
        if mark.text.startswith(" ") and mark.text.strip() in _PREPENDED:
            _join(word, mark.text + word.text, mark)
        else:
            following = i
    before = 0
    for i in range(1, len(timings)):
        word, mark = timings[before], timings[i]
        if not word.text.endswith(" ") and mark.text in _APPENDED:
            _join(word, word.text + mark.text, mark)
        else:
            before = i


def _join(word: WordTiming, text: str, mark: WordTiming) -> None:
    word.text, mark.text = text, ""
    word.tokens, mark.tokens = word.tokens + mark.tokens, 0


def whole_words(parts: Sequence[WordTiming], spaceless: bool) -> list[WordTiming]:
    """Join the parts of each word.

    Args:
        parts: the parts of one segment, in order.
        spaceless: whether the language is written without spaces. Then parts are words, except
            that vowel signs and marks join the letter before them.

    Returns:
        The words. A word lasts from its first part to its last one and has the probabilities of
        all its parts. Unspoken marks change neither.
    """
    words: list[WordTiming] = []
    for part in parts:
        if words and _continues(words[-1].text, part.text, spaceless):
            words[-1] = _combined(words[-1], part)
        else:
            words.append(part)
    return words


def _continues(before: str, text: str, spaceless: bool) -> bool:
    """Return whether a part belongs to the word before it."""
    if not before.strip() or not text.strip():
        return True
    if text[0].isspace() and text[0] not in _NO_BREAK:
        return False
    return not spaceless or is_joined(before[-1], text[0])


def _combined(word: WordTiming, part: WordTiming) -> WordTiming:
    """Join a word with its next part; unspoken marks do not change its times."""
    text, tokens = word.text + part.text, word.tokens + part.tokens
    if _is_silent(part.text):
        return dataclasses.replace(word, text=text, tokens=tokens)
    if _is_silent(word.text):
        return dataclasses.replace(part, text=text, tokens=tokens)
    probabilities = np.concatenate([word.probabilities, part.probabilities])
    return WordTiming(text, tokens, word.start_s, part.end_s, probabilities)


def _is_silent(text: str) -> bool:
    return all(
        char in _SILENT or char.isspace() or unicodedata.category(char) in _SILENT_CATEGORIES
        for char in text
    )
