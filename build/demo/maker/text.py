"""Sentences to train and to test on, drawn from the English and Spanish grammars by seed.

A sentence belongs to the training or to the held-out split by its own checksum, so that no
held-out sentence can occur in training whatever the seeds. To look at some:

    python -m build.demo.maker.text --seed 1 --count 20 --split heldout
"""

import argparse
import random
import zlib
from collections.abc import Iterator

from build.demo.maker import english, spanish
from build.demo.maker.grammar import Sentence

LANGUAGES = ("en", "es")
SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 20
MAX_CHARS = 150


def split_of(text: str) -> str:
    """Which split the sentence belongs to, by its checksum."""
    return "heldout" if zlib.crc32(text.encode()) % HELDOUT_ONE_IN == 0 else "train"


def draw(rng: random.Random, split: str, language: str | None = None) -> Sentence:
    """One sentence of the split; of either language, English a little more, unless one is named."""
    chosen = language or ("en" if rng.random() < 0.55 else "es")
    make = english.sentence if chosen == "en" else spanish.sentence
    while True:
        text = make(rng)
        if len(text) <= MAX_CHARS and split_of(text) == split:
            return Sentence(text, chosen)


def sentences(seed: int, split: str = "train") -> Iterator[Sentence]:
    """Endless sentences of a split, the same for the same seed."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    rng = random.Random(seed)
    while True:
        yield draw(rng, split)


def main() -> None:
    """Print sentences."""
    parser = argparse.ArgumentParser(description="Print sentences of the demo grammar.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--split", choices=SPLITS, default="train")
    arguments = parser.parse_args()
    source = sentences(arguments.seed, arguments.split)
    for _ in range(arguments.count):
        item = next(source)
        print(f"{item.language}\t{item.text}")  # noqa: T201


if __name__ == "__main__":
    main()
