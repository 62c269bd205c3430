"""Find sentences, marks that belong to the letter before them, and texts that are equal."""

import itertools
import re
import unicodedata
from collections.abc import Sequence

# In Thai and Lao these vowels are separate characters before or after their consonant.
_VOWELS_BEFORE = frozenset("เแโใไເແໂໃໄ")
_VOWELS_AFTER = frozenset("ะาำๅະາຳຽ")
_JOINERS = frozenset("\u1039\u17d2\u200d")  # for stacked Burmese and Khmer consonants; emoji


def is_joined(last: str, first: str) -> bool:
    """Return whether two adjacent characters belong to one letter.

    Args:
        last: the first of the two characters.
        first: the character after `last`.
    """
    return (
        unicodedata.category(first).startswith("M")
        or first in _VOWELS_AFTER
        or last in _VOWELS_BEFORE
        or last in _JOINERS
        or first in _JOINERS
    )


ENDS = ".?!…。？！｡．؟।॥۔።፧။།༎។៕։"
CLOSING = "\"'”’»)]}」』）】》〉］｝"  # may follow these marks

_OPENING = "\"'“‘„«¿¡([{"
_DOTS = ".…"
# Parts of U.S., a.m., Ph.D., z.B. and EE.UU.; a title such as Mrs; a day as in "am 3. Mai".
_ABBREVIATION = re.compile(
    r"([^\W\d_]{1,2}\.-?)+[^\W\d_]{1,2}|[bcdfghjklmnpqrstvwxz]{1,3}|[0-9]{1,2}", re.IGNORECASE
)
_TITLES = frozenset(
    "adm avv capt cmdr col dott dra frau gen gov herr hon ing maj mevr mlle mme pres prof rep rev "
    "sen sgt sig sra srta supt ave dept univ approx ca".split()
)
_BEFORE_NUMBERS = frozenset(
    "no núm num fig vol art sec pág cap jan feb mar apr jun jul aug sep sept oct nov dec".split()
)


def sentence_ends(words: Sequence[str]) -> list[bool]:
    """Return for each word whether it ends a sentence.

    A period does not end a sentence if a lower-case word follows, unless the whole text is
    lower-case. A period after an initial, a title or a number of one or two digits does not count
    either, so the end of a sentence is missed there.

    Args:
        words: the words in order, with their punctuation; spaces around them are ignored.
    """
    cased = any(char.isupper() for word in words for char in word)
    return [
        _ends(word.strip(), following.strip().lstrip(_OPENING)[:1], cased)
        for word, following in itertools.zip_longest(words, words[1:], fillvalue="")
    ]


def _ends(word: str, next_char: str, cased: bool) -> bool:
    stripped = word.rstrip(CLOSING)
    if not stripped or stripped[-1] not in ENDS:
        return False
    if stripped[-1] not in _DOTS or not next_char:
        return True
    if next_char.islower() and cased:
        return False
    word_core = stripped[:-1].lstrip(_OPENING).lower()
    if next_char.isdigit() and word_core in _BEFORE_NUMBERS:
        return False
    # A letter of a script with upper and lower case:
    is_initial = len(word_core) == 1 and word_core.islower()
    return not (is_initial or word_core in _TITLES or _ABBREVIATION.fullmatch(word_core))


def normalize_text(text: str) -> str:
    """Normalise a text: NFKC, no case, no punctuation, single spaces between words.

    Numbers and accents do not change. `eval` calls this normaliser basic-v1.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    characters = []
    for character in text:
        category = unicodedata.category(character)
        if category == "Pd":  # words may be written with a dash or with a space between them
            characters.append(" ")
        elif not category.startswith("P"):
            characters.append(character)
    return " ".join("".join(characters).split())
