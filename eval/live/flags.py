"""The flags of `python -m eval live`."""

import argparse

from eval.arguments import add_config, add_output, counts, positive

STREAMS = (1, 4)
CLIPS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add = parser.add_argument
    add(
        "--streams", type=counts, default=STREAMS, metavar="N,M",
        help=f"at a time, one after another; default: {','.join(map(str, STREAMS))}",
    )  # fmt: skip
    add(
        "--clips", type=positive, default=CLIPS, metavar="N",
        help="that each stream plays, at the pace of speech; default: %(default)s",
    )  # fmt: skip
    add_output(parser, "live")
