"""The flags of `python -m eval live`."""

import argparse

from eval.arguments import add_config, add_output, counts, positive, seconds

STREAMS = (1, 4)
CLIPS = 6
JOIN_S = 60.0


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
    add("--speech", metavar="CLIPS", help="recordings with their texts; default: eval.manifest")
    add("--half", metavar="NAME", help="of a manifest's two, '' for both; default: as configured")
    add(
        "--join-s", type=seconds, default=JOIN_S, metavar="S",
        help="clips whose speaker is known are joined to passages of at most so long; "
        "default: %(default)g",
    )  # fmt: skip
    add(
        "--simulate", type=seconds, default=0.0, metavar="S",
        help="no server: streams run as fast as they are decoded, by a clock by which every "
        "decoding takes so many seconds; accuracy is real, and lateness is what such a machine has",
    )  # fmt: skip
    add_output(parser, "live")
