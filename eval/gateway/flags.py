"""The flags of `python -m eval gateway`."""

import argparse

from eval.arguments import add_config, add_output, positive, seconds

AT_ONCE = 8
PASSES = 5
CONNECTIONS = 200
IDLE_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add = parser.add_argument
    add(
        "--at-once", type=positive, default=AT_ONCE, metavar="N",
        help="requests at a time; default: %(default)s",
    )  # fmt: skip
    add(
        "--passes", type=positive, default=PASSES, metavar="N",
        help="times that each way gets all clips, in turn; default: %(default)s",
    )  # fmt: skip
    add(
        "--connections", type=positive, default=CONNECTIONS, metavar="N",
        help="that do nothing, of each kind; default: %(default)s",
    )  # fmt: skip
    add(
        "--seconds", type=seconds, default=IDLE_S, metavar="S",
        help="for which they do so; default: %(default)s",
    )  # fmt: skip
    add_output(parser, "gateway")
