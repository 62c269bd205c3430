"""The flags of `python -m eval long`."""

import argparse

from eval.arguments import add_config, add_output, add_systems, positive
from eval.long.plan import NAMES, PEOPLE_PLAN, PLAN, SEED, minutes_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add_systems(parser, "default: all, " + ", ".join(NAMES))
    add = parser.add_argument
    add(
        "--minutes", type=positive, metavar="M",
        help="of composed recordings, at least; default: the plan, "
        f"{minutes_of(PLAN):.0f}, of people {minutes_of(PEOPLE_PLAN):.0f} and their passages",
    )  # fmt: skip
    add("--seed", type=int, default=SEED, metavar="N", help="of them; default: %(default)s")
    add(
        "--again", action="store_true",
        help="let these systems hear everything again; otherwise a run goes on where it ended",
    )  # fmt: skip
    add_output(parser, "long")
