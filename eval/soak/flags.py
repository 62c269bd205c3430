"""The flags of `python -m eval soak`."""

import argparse

from eval.arguments import add_config, add_output, positive
from eval.soak.plan import SCENARIOS

MINUTES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add = parser.add_argument
    add(
        "--minutes", type=positive, default=MINUTES, metavar="M",
        help="that it lasts; default: %(default)s",
    )  # fmt: skip
    add(
        "--actions", type=positive, metavar="N", help="after which it ends, if that comes before",
    )  # fmt: skip
    add(
        "--seed", type=int, default=0, metavar="S",
        help="says what each client does; default: %(default)s",
    )  # fmt: skip
    add(
        "--scenario", nargs="*", metavar="NAME", dest="scenarios",
        help="instead, these in turn, each on a server of its own; without a name all. "
        + "; ".join(f"{name}: {title}" for name, title in SCENARIOS.items()),
    )  # fmt: skip
    add_output(parser, "soak")
