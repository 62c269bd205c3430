"""What the English and Spanish grammars share: a random source, templates, and the sentence type.

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


def fill(template: str, slots: Mapping[str, Slot], rng: random.Random) -> str:
    """Replace every `{slot}`; what a slot returns may hold slots of its own."""
    while "{" in template:
        template = _SLOT.sub(lambda match: slots[match.group(1)](rng), template)
    return template


def weighted(table: Sequence[tuple[float, str]], rng: random.Random) -> str:
    """One template of the table, by weight."""
    weights = [weight for weight, _ in table]
    return rng.choices([template for _, template in table], weights)[0]


def capitalise(text: str) -> str:
    """Upper-case the first letter, after an opening mark if there is one."""
    for index, char in enumerate(text):
        if char.isalpha():
            return text[:index] + char.upper() + text[index + 1 :]
    return text
