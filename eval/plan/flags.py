"""The flags of `python -m eval plan`."""

import argparse
from pathlib import Path

from eval.arguments import add_config, add_output, positive, seconds
from serve.fields import MAX_BEAMS

POLICY = Path("deploy/kubernetes/components/keda/scale.yaml")
DAYS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add = parser.add_argument
    add(
        "--load", type=seconds, required=True, metavar="N",
        help="requests of 10 s of audio a second; with --simulate their mean over a day",
    )  # fmt: skip
    add(
        "--p99", type=seconds, required=True, metavar="S",
        help="seconds within which 99 of 100 are answered",
    )  # fmt: skip
    add("--price", type=seconds, metavar="P", help="of a GPU for an hour, in any currency")
    add(
        "--beam-size", type=int, choices=range(1, MAX_BEAMS + 1), metavar="N",
        help="of all requests; default: transcriber.beam_size",
    )  # fmt: skip
    add(
        "--measured", type=Path, metavar="FILE",
        help="what `python -m eval bench --json FILE` wrote on such a GPU; default: the committed "
        "figures of the config's name, in eval/plan/measured/",
    )  # fmt: skip
    simulated = parser.add_argument_group("a day", "Autoscaling, replayed before it is believed.")
    add = simulated.add_argument
    add("--simulate", action="store_true", help="replay days of bursty arrivals")
    add(
        "--provision-s", type=seconds, metavar="S",
        help="from the call for a pod to its container's start: node, image and volume. Only you "
        "can know it; needed with --simulate",
    )  # fmt: skip
    add(
        "--policy", type=Path, default=POLICY, metavar="YAML",
        help="ScaledObject whose limits, steps and thresholds are tried; default: %(default)s",
    )  # fmt: skip
    add(
        "--slower", type=seconds, default=1.0, metavar="N",
        help="replay as if requests took N times as long as measured, under the same thresholds: "
        "longer ones, or another GPU; default: %(default)g",
    )  # fmt: skip
    add("--days", type=positive, default=DAYS, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of the first day; default: %(default)s")
    add_output(parser, "plan")
