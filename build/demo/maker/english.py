"""The English grammar: slots and templates over `words_en.py`."""

import random

from build.demo.maker import words_en as words
from build.demo.maker.grammar import Slot, capitalise, chooser, digits, fill, salad, weighted
from build.demo.maker.numbers import english_number, english_time

_VOWELS = "aeiou"
_AN_EXCEPTIONS = {"honest", "hour"}
_A_EXCEPTIONS = {"university", "uniform", "useful", "usual", "european", "universe", "union"}
# Regular verbs whose last consonant doubles.
_DOUBLING = {
    "admit", "drag", "drop", "fit", "grab", "hug", "jog", "permit", "plan", "prefer", "rob", "rub",
    "ship", "shop", "skip", "stop", "tip", "trap", "wrap",
}  # fmt: skip


def plural(noun: str) -> str:
    """The noun's plural."""
    if noun in words.IRREGULAR_PLURALS:
        return words.IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in _VOWELS:
        return noun[:-1] + "ies"
    return noun + "s"


def verb_forms(base: str) -> tuple[str, str, str, str]:
    """Base, third person, past and -ing form of a regular verb."""
    if base.endswith("e"):
        return base, base + "s", base + "d", base[:-1] + "ing"
    if base.endswith("y") and base[-2] not in _VOWELS:
        return base, base[:-1] + "ies", base[:-1] + "ied", base + "ing"
    stem = base + base[-1] if base in _DOUBLING else base
    third = base + ("es" if base.endswith(("s", "x", "z", "ch", "sh")) else "s")
    return base, third, stem + "ed", stem + "ing"


def _table(text: str) -> list[tuple[str, str, str, str]]:
    rows = [row.split() for row in text.replace("\n", "|").split("|") if row.strip()]
    return [(row[0], row[1], row[2], row[3]) for row in rows]


def article(phrase: str) -> str:
    """The phrase after its indefinite article."""
    first = phrase.split()[0]
    vowel = first[0] in _VOWELS
    vowel = (vowel and first not in _A_EXCEPTIONS) or first in _AN_EXCEPTIONS
    return f"{'an' if vowel else 'a'} {phrase}"


_COUNT_NOUNS = [noun for noun in words.NOUNS if noun not in words.MASS]
_PLURALS = [plural(noun) for noun in _COUNT_NOUNS]
_TRANSITIVE = [verb_forms(verb) for verb in words.VERBS] + _table(words.IRREGULAR_VERBS)
_INTRANSITIVE = _table(words.INTRANSITIVE)
_ALL_WORDS = sorted(
    {
        *words.NOUNS, *_PLURALS, *words.ADJECTIVES, *words.ADVERBS,
        *(form for forms in _TRANSITIVE + _INTRANSITIVE for form in forms),
    }
)  # fmt: skip


def _a_noun(rng: random.Random) -> str:
    noun = rng.choice(_COUNT_NOUNS)
    return article(f"{rng.choice(words.ADJECTIVES)} {noun}" if rng.random() < 0.4 else noun)


def _number(rng: random.Random) -> str:
    return english_number(rng.choice([rng.randint(2, 20), rng.randint(2, 99), rng.randint(2, 999)]))


def _big_number(rng: random.Random) -> str:
    return english_number(rng.choice([rng.randint(100, 9999), rng.randint(1000, 999999)]))


def _time(rng: random.Random) -> str:
    minute = rng.choice([0, 15, 30, 45, 5 * rng.randint(0, 11), rng.randint(1, 59)])
    return english_time(rng.randint(1, 12), minute)


def _date(rng: random.Random) -> str:
    return f"{rng.choice(words.MONTHS)} {rng.choice(words.ORDINALS)}"


def _name_list(rng: random.Random) -> str:
    names = rng.sample(words.FIRST_NAMES, 3)
    return f"{names[0]}, {names[1]} and {names[2]}"


SLOTS: dict[str, Slot] = {
    "noun": chooser(words.NOUNS),
    "count": chooser(_COUNT_NOUNS),
    "nouns": chooser(_PLURALS),
    "a": _a_noun,
    "adj": chooser(words.ADJECTIVES),
    "adv": chooser(words.ADVERBS),
    "who": chooser(words.PEOPLE),
    "first": chooser(words.FIRST_NAMES),
    "last": chooser(words.LAST_NAMES),
    "place": chooser(words.PLACES),
    "day": chooser(words.DAYS),
    "month": chooser(words.MONTHS),
    "season": chooser(words.SEASONS),
    "ordinal": chooser(words.ORDINALS),
    "unit": chooser(words.UNITS),
    "rel": chooser(words.RELATIONS),
    "hey": chooser(words.EXCLAMATIONS),
    "v": chooser([forms[0] for forms in _TRANSITIVE]),
    "vs": chooser([forms[1] for forms in _TRANSITIVE]),
    "ved": chooser([forms[2] for forms in _TRANSITIVE]),
    "ving": chooser([forms[3] for forms in _TRANSITIVE]),
    "i": chooser([forms[0] for forms in _INTRANSITIVE]),
    "is": chooser([forms[1] for forms in _INTRANSITIVE]),
    "ied": chooser([forms[2] for forms in _INTRANSITIVE]),
    "iing": chooser([forms[3] for forms in _INTRANSITIVE]),
    "number": _number,
    "big": _big_number,
    "time": _time,
    "date": _date,
    "salad": salad(_ALL_WORDS, words.FUNCTION),
    "digits": digits(english_number),
    "names": _name_list,
    "poss": chooser("my your his her our their the the the this that".split()),
    "he": chooser("he she I you we they".split()),
    "modal": chooser("can will could would should must may might cannot".split()),
    "obj": chooser(
        [
            "{poss} {noun}",
            "{poss} {adj} {noun}",
            "{a}",
            "{number} {nouns}",
            "the {nouns}",
            "some {nouns}",
            "many {adj} {nouns}",
            "every {count}",
            "it",
            "them",
            "the {noun} of the {noun}",
            "the {noun} to the {noun}",
            "a {count} of {nouns}",
            "{poss} {noun} with {a}",
        ]
    ),
    "subj": chooser(
        [
            "the {who}",
            "{poss} {who}",
            "the {adj} {who}",
            "{first}",
            "{first} {last}",
            "the {count}",
            "{poss} {adj} {count}",
            "nobody",
            "everyone",
            "somebody",
        ]
    ),
    "where": chooser(
        [
            "in {place}",
            "{rel} the {noun}",
            "at the {count}",
            "in the {noun}",
            "on the {noun}",
            "near {place}",
            "to the {noun}",
            "into the {noun}",
            "with {first}",
            "without {nouns}",
            "about {poss} {noun}",
            "by the {noun}",
            "through the {noun}",
            "with {poss} {adj} {who}",
            "from {place} to {place}",
            "{rel} {poss} {adj} {noun}",
        ]
    ),
    "when": chooser(
        [
            "on {day}",
            "in {month}",
            "at {time}",
            "last {day}",
            "next {season}",
            "on {date}",
            "every {day}",
            "tomorrow",
            "today",
            "this morning",
            "last night",
            "{number} days ago",
            "after {poss} {noun}",
            "before the {noun}",
            "for {number} {unit}",
        ]
    ),
}

_CLAUSES = (
    (3, "{subj} {ved} {obj}"),
    (2, "{subj} {vs} {obj} {when}"),
    (2, "{subj} {ved} {obj} {where}"),
    (2, "{subj} {ied} {where}"),
    (1, "{subj} is {iing} {where}"),
    (1, "{subj} {adv} {ved} {obj}"),
    (2, "{he} {ved} {obj} {when}"),
    (1, "{he} {modal} {v} {obj}"),
    (1, "{subj} {is} {adv}"),
    (1, "{subj} was {ving} {obj}"),
    (1, "the {noun} is {adj} and {adj}"),
    (1, "{subj} {modal} {i} {where}"),
    (1, "there were {number} {nouns} {where}"),
    (1, "{subj} has {number} {nouns}"),
    (1, "{subj} is {adj}"),
    (1, "{subj} was very {adj}"),
    (1, "{subj} has a {adj} {count} and {number} {adj} {nouns}"),
    (1, "{subj} {ved} {obj} to {obj}"),
    (1, "{nouns} are {adj}"),
    (1, "{he} want to {v} {obj}"),
    (1, "{subj} {ved} {obj} for {obj}"),
    (1, "the {noun} costs {big} dollars"),
)
_SENTENCES = (
    (9, "{clause}."),
    (3, "{clause} and {clause}."),
    (2, "{clause}, but {clause}."),
    (2, "When {clause}, {clause}."),
    (1, "If {clause}, {clause}."),
    (1, "Because {clause}, {clause}."),
    (1, "{clause} because {clause}."),
    (1, "{adv}, {clause}."),
    (2, "{hey}."),
    (1, "{hey}, {first}."),
    (1, "{hey}, {clause}."),
    (1, "Where is {poss} {noun}?"),
    (1, "When did {subj} {v} {obj}?"),
    (1, "Why did you {v} {obj} {when}?"),
    (1, "How many {nouns} did {first} {v}?"),
    (1, "Can you {v} {obj}, please?"),
    (1, "Do you want to {v} {obj}?"),
    (1, "What time is it in {place}?"),
    (1, "It is {time} {where}."),
    (1, "The {noun} opens at {time} on {day}."),
    (1, "We will meet on {day}, {date}, at {time}."),
    (1, "My name is {first} {last} and I live in {place}."),
    (1, "{first} {last} was born in {place} on {date}."),
    (1, "The number is {digits}."),
    (1, "{big} people live in {place}."),
    (1, "The distance is {big} {unit}."),
    (1, "{names} {ied} {where}."),
    (1, "Please {v} {obj} {when}."),
    (1, "Don't {v} {obj}."),
    (1, "I'm {iing} {where}."),
    (1, "It's the {ordinal} {count} of the {count}."),
    (1, "They bought {nouns}, {nouns} and {nouns}."),
    (6, "{salad}."),
    (1, "{first}."),
    (1, "{adj} {nouns}."),
)
_sentence = weighted(_SENTENCES)
SLOTS["clause"] = weighted(_CLAUSES)


def sentence(rng: random.Random) -> str:
    """One English sentence, cased and punctuated."""
    return capitalise(fill(_sentence(rng), SLOTS, rng))
