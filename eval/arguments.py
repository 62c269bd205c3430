"""Declarations of flags of `python -m eval`, and parsers of their values."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """An option or an argument of a command.

    Attributes:
        name: as it is written, and what stands for its value; without dashes it is an argument.
        help: says what it is; the default is added unless it names one.
        type: makes the value of text.
        default: the value where it is not given.
        sets: the setting of the config that it stands for, such as eval.limit; "": it is given to
            the command itself.
        options: others of `argparse`.
        also: settings of the same section that it changes, too; later flags change them again.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    sets: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    also: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Let a parser know it."""
        name, _, metavar = self.name.partition(" ")
        options = {"help": self._help(), "default": self.default, **self.options}
        if metavar:
            options["metavar"] = metavar
        if options.get("action") != "store_const":
            options["type"] = self.type
        parser.add_argument(name, **options)

    def _help(self) -> str:
        silent = self.default in (None, "", ()) or self.default is False
        if silent or "default:" in self.help:
            return self.help
        return "; ".join(filter(None, (self.help, f"default: {shown(self.default)}")))

    @property
    def dest(self) -> str:
        """Return the command's name for its value."""
        name = self.name.partition(" ")[0].lstrip("-")
        return str(self.options.get("dest", name.replace("-", "_")))


def switch(name: str, help: str, sets: str = "") -> Flag:
    """Declare a flag without a value; one that sets something else stays as configured."""
    default = None if sets else False
    return Flag(name, help, str, default, sets, {"action": "store_const", "const": True})


def shown(value: Any) -> str:
    """Write a default as it would be given."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def names(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> int:
    """Parse a whole number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0, between commas."""
    return tuple(positive(number) for number in text.split(","))


def ratios(text: str) -> tuple[float, ...]:
    """Parse numbers above 0, between commas."""
    return tuple(seconds(number) for number in text.split(","))


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def percentage(text: str) -> float:
    """Parse a number from 0 to 100."""
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100")
    return value


def seconds(text: str) -> float:
    """Parse a time above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
