"""The flags of `python -m eval bulk`."""

import argparse

from eval.arguments import add_config, add_output, positive
from eval.config import EvalConfig

TIMES = 1
PASSES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add = parser.add_argument
    add(
        "--manifest", default=EvalConfig.heldout, metavar="CLIPS",
        help="files to transcribe; default: %(default)s",
    )  # fmt: skip
    add(
        "--times", type=positive, default=TIMES, metavar="N",
        help="each file so often, which makes a pass longer; default: %(default)s",
    )  # fmt: skip
    add(
        "--passes", type=positive, default=PASSES, metavar="N",
        help="of all files each way, in turn; default: %(default)s",
    )  # fmt: skip
    add_output(parser, "bulk")
