"""Dockerfiles as lists of instructions, as far as this project's need it."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"


def instructions(path):
    """(instruction, argument) of each line, comments left out and continued lines joined."""
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    logical = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in logical if line.strip()]


def all_of(path, instruction):
    """The arguments of all instructions of a name."""
    return [argument for name, argument in instructions(path) if name == instruction]


def copied(path):
    """(sources, target) of each COPY."""
    return [(words[:-1], words[-1]) for words in (text.split() for text in all_of(path, "COPY"))]


def environment(path):
    """What ENV sets, as it is written."""
    pairs = [pair for text in all_of(path, "ENV") for pair in shlex.split(text)]
    return dict(pair.split("=", 1) for pair in pairs)
