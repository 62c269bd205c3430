"""Flags that commands of `python -m eval` share, and what their values have to be."""

import argparse
import math
from pathlib import Path


def add_config(parser: argparse.ArgumentParser) -> None:
    """Which product."""
    parser.add_argument("--config", required=True, metavar="TOML", help="such as configs/demo.toml")


def add_output(parser: argparse.ArgumentParser, kind: str = "") -> None:
    """Where the command of this kind writes; see `output_of`."""
    where = _reports("<name of the config>", kind)
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"default: {where}")


def output_of(options: argparse.Namespace, name: str, kind: str = "") -> Path:
    """The folder that was named, else the config's own for this kind of command."""
    return options.output or _reports(name, kind)


def _reports(name: str, kind: str) -> Path:
    return Path("reports") / (f"{name}-{kind}" if kind else name)


def add_systems(parser: argparse.ArgumentParser, default: str) -> None:
    """Which systems; `default` says which if none is named."""
    parser.add_argument("--systems", type=names, metavar="A,B", help=f"comma separated; {default}")


def names(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, between commas."""
    return tuple(positive(number) for number in text.split(","))


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
