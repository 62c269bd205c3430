"""`python -m eval live`: its flags and its run."""

import argparse
import sys
from pathlib import Path

from eval.arguments import add_config, counts, positive
from eval.config import load_config

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
    add("--output", type=Path, metavar="DIR", help="default: reports/<name of the config>-live")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status is 1 where the last number of streams was not held."""
    from eval.live.run import live  # noqa: PLC0415 - needs jiwer, and loads torch

    config = load_config(options.config)
    folder = options.output or Path("reports") / f"{config.name}-live"
    levels = live(config, options.streams, options.clips, folder, sys.stderr.write)
    return 0 if levels[-1].held else 1
