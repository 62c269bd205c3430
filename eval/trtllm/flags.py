"""The flags of `python -m eval trtllm-check`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    parser.add_argument(
        "--python", default="", metavar="PATH",
        help="of another environment that has release 1.3 or later; default: this one",
    )  # fmt: skip
