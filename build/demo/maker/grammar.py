"""What the English and Spanish grammars share: slots, templates, and the sentence type.

A grammar is a table of templates; `{slot}` is filled by a function of the random source.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Slot = Callable[[random.Random], str]
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Sentence:
    """One utterance's text, as it is to be transcribed, and its language code."""

    text: str
    language: str


def chooser(options: Sequence[str]) -> Slot:
    """A slot that picks one of `options`."""
    fixed = tuple(options)

    def choose(rng: random.Random) -> str:
        return fixed[int(rng.random() * len(fixed))]

    return choose


def salad(content: Sequence[str], function: Sequence[str]) -> Slot:
    """A slot of 2 to 11 words without grammar, about every third a function word."""

    def words(rng: random.Random) -> str:
        lists = (content, content, function)
        return " ".join(rng.choice(rng.choice(lists)) for _ in range(rng.randint(2, 11)))

    return words


def digits(number: Callable[[int], str]) -> Slot:
    """A slot of 3 to 8 digits in words, which `number` gives."""

    def words(rng: random.Random) -> str:
        return " ".join(number(rng.randint(0, 9)) for _ in range(rng.randint(3, 8)))

    return words


def fill(template: str, slots: Mapping[str, Slot], rng: random.Random) -> str:
    """Replace every `{slot}`; what a slot returns may hold slots of its own."""
    while "{" in template:
        template = _SLOT.sub(lambda match: slots[match.group(1)](rng), template)
    return template


def weighted(table: Sequence[tuple[float, str]]) -> Slot:
    """A slot that picks one template of the table, by weight."""
    weights = [weight for weight, _ in table]
    templates = [template for _, template in table]
    return lambda rng: rng.choices(templates, weights)[0]


def capitalise(text: str) -> str:
    """Upper-case the first letter, after an opening mark if there is one."""
    for index, char in enumerate(text):
        if char.isalpha():
            return text[:index] + char.upper() + text[index + 1 :]
    return text
