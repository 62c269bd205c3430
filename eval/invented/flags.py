"""The flags of `python -m eval invented`."""

import argparse

from eval.arguments import add_config, add_output, add_systems, positive

NAMES = ("earshot-parallel", "earshot-no-vad", "faster-whisper-default", "faster-whisper-vad")
"""Systems of `eval.long.plan`."""

LIMIT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add_systems(parser, "default: " + ", ".join(NAMES))
    add = parser.add_argument
    add(
        "--speech", metavar="CLIPS",
        help="of people, with their texts: sources, and heard as they are; default: eval.manifest",
    )  # fmt: skip
    add("--half", default="", metavar="NAME", help='of these, such as "report"; default: both')
    add(
        "--limit", type=positive, default=LIMIT, metavar="N",
        help="of them are heard as they are; default: %(default)s",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of everything; default: %(default)s")
    add_output(parser, "invented")
