"""The flags of `python -m eval bench`."""

import argparse
from pathlib import Path

from eval.arguments import add_config, counts, names, positive, seconds, share
from eval.bench.plan import DRAFT_TOKENS, WORKLOADS, Load, Plan
from serve.fields import MAX_BEAMS

_OF_PLAN = (
    *("workloads", "slots", "seconds", "streams", "update_s", "beam_size", "draft_acceptance"),
    *("requests", "ablate", "through_triton"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's."""
    add_config(parser)
    add = parser.add_argument
    what = "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
    add(
        "--workloads", type=names, default=Plan.workloads, metavar="A,B",
        help=f"default: all. {what}",
    )  # fmt: skip
    add(
        "--slots", type=counts, default=Plan.slots, metavar="N,M",
        help="throughput and steps with each, latency and open-loop with the first, mlperf and "
        f"live with the last; default: {','.join(map(str, Plan.slots))}",
    )  # fmt: skip
    add(
        "--seconds", type=positive, default=Plan.seconds, metavar="S",
        help="least time per figure, without its warm-up; default: %(default)g",
    )  # fmt: skip
    add(
        "--streams", type=positive, default=Plan.streams, metavar="N",
        help="of the live workload, which finds how many are held: where it begins; default: "
        "%(default)s",
    )  # fmt: skip
    add(
        "--update-s", type=seconds, default=Plan.update_s, metavar="S",
        help="of the live workload: between two decodings of a stream; default: %(default)g",
    )  # fmt: skip
    _add_beam_size(parser, Plan.beam_size)
    add(
        "--draft-acceptance", type=share, metavar="P",
        help="with a draft decoder of two layers, of whose guesses this share is right, 0 to 1; "
        f"runtime.draft_tokens of them a turn, or {DRAFT_TOKENS}; default: without a draft",
    )  # fmt: skip
    add(
        "--requests", type=positive, default=Plan.requests, metavar="N",
        help="of the latency workload, through Triton too; default: %(default)s",
    )  # fmt: skip
    add("--ablate", action="store_true", help="turn each option: its gain and its error")
    add(
        "--through-triton", action="store_true",
        help="the same load on a real tritonserver over gRPC, audio in, text out",
    )  # fmt: skip
    add(
        "--peers", type=names, metavar="A,B",
        help="of hugging-face, faster-whisper and vllm; '' for none; default: what is installed",
    )  # fmt: skip
    add(
        "--json", type=Path, metavar="FILE", help="keep the figures here too, each once it is known"
    )
    # Former versions demanded it. Old command lines go on working.
    add("--random-weights", action="store_true", help=argparse.SUPPRESS)


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `python -m eval scale`."""
    add_config(parser)
    add, load = parser.add_argument, Load()
    add(
        "--device", action="append", metavar="DEVICE", dest="devices",
        help="as runtime.device has it; once for each server; default: "
        f"{' and '.join(load.devices)}",
    )  # fmt: skip
    add(
        "--clients", type=positive, default=load.clients, metavar="N",
        help="requests in flight for each engine; default: %(default)s",
    )  # fmt: skip
    add(
        "--seconds", type=seconds, default=load.seconds, metavar="S",
        help="of each figure, without its warm-up; default: %(default)g",
    )  # fmt: skip
    add(
        "--shortest", type=seconds, default=load.shortest_s, metavar="S",
        help="of the clips; default: %(default)g",
    )  # fmt: skip
    add("--longest", type=seconds, default=load.longest_s, metavar="S", help="default: %(default)g")
    add("--slots", type=positive, default=load.slots, metavar="N", help="default: as configured")
    _add_beam_size(parser, load.beam_size)
    add("--json", type=Path, metavar="FILE", help="keep the figures here too")


def _add_beam_size(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--beam-size", type=int, choices=range(1, MAX_BEAMS + 1), default=default, metavar="N",
        help=f"of every request; 1 to {MAX_BEAMS}; default: %(default)s, greedy",
    )  # fmt: skip


def load_of(options: argparse.Namespace) -> Load:
    """What was asked for of `python -m eval scale`."""
    return Load(
        tuple(options.devices or Load.devices),
        options.clients,
        options.seconds,
        options.shortest,
        options.longest,
        options.slots,
        options.beam_size,
    )


def plan_of(options: argparse.Namespace, peers: tuple[str, ...]) -> Plan:
    """What was asked for."""
    return Plan(**{flag: getattr(options, flag) for flag in _OF_PLAN}, peers=peers)
