"""The flags of `python -m eval long`."""

import argparse

from eval.arguments import add_config, add_output, add_systems, positive
from eval.long.plan import MINUTES, NAMES, SEED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add_systems(parser, "default: all, " + ", ".join(NAMES))
    add = parser.add_argument
    add(
        "--minutes", type=positive, default=MINUTES, metavar="M",
        help="of recordings, at least; default: %(default)s",
    )  # fmt: skip
    add("--seed", type=int, default=SEED, metavar="N", help="of them; default: %(default)s")
    add(
        "--again", action="store_true",
        help="let these systems hear everything again; otherwise a run goes on where it ended",
    )  # fmt: skip
    add_output(parser, "long")
