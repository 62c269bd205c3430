"""The flags of the commands of `python -m eval` that measure speed on a GPU."""

from typing import get_args

from eval.arguments import Flag, counts, names, positive, seconds, share, switch
from eval.bench.plan import DRAFT_TOKENS, WORKLOADS, Load, Plan
from serve.contract.fields import MAX_BEAMS, ShortEncoder


def beam_size(help: str, default: int | None = None, sets: str = "") -> Flag:
    """Declare the flag of a search's width."""
    beams = {"choices": range(1, MAX_BEAMS + 1)}
    return Flag("--beam-size N", help, int, default, sets, beams)


GREEDY = f"of every request; 1 to {MAX_BEAMS}; default: 1, greedy"
BENCH = (
    Flag(
        "--workloads A,B",
        "default: all. " + "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items()),
        names,
        Plan.workloads,
    ),
    Flag(
        "--slots N,M",
        "throughput with each, latency and open-loop with the first, mlperf with the last",
        counts,
        Plan.slots,
    ),
    Flag("--seconds S", "least time per figure, without its warm-up", positive, Plan.seconds),
    beam_size(GREEDY, Plan.beam_size),
    Flag(
        "--draft-acceptance P",
        "with a draft decoder of two layers, of whose guesses this share is right, 0 to 1; "
        f"runtime.draft_tokens of them a turn, or {DRAFT_TOKENS}; default: without a draft",
        share,
    ),
    Flag("--requests N", "of the latency workload, through Triton too", positive, Plan.requests),
    Flag(
        "--request-s S",
        "of sound, of a request of latency and open-loop, at most 30",
        seconds,
        Plan.request_s,
    ),
    Flag(
        "--short-encoder HOW",
        "how much of these is encoded, as transcriber.short_encoder says",
        default=Plan.short_encoder,
        options={"choices": get_args(ShortEncoder)},
    ),
    switch("--ablate", "turn each option: its gain and its error"),
    switch(
        "--through-triton", "the same load on a real tritonserver over gRPC, audio in, text out"
    ),
    Flag(
        "--peers A,B",
        "of faster-whisper and vllm; '' for none; default: what is installed",
        names,
    ),
)
SCALE = (
    Flag(
        "--device DEVICE",
        f"as runtime.device has it; once for each server; default: {' and '.join(Load.devices)}",
        options={"action": "append", "dest": "devices"},
    ),
    Flag("--clients N", "requests in flight for each engine", positive, Load.clients),
    Flag("--seconds S", "of each figure, without its warm-up", seconds, Load.seconds),
    Flag("--shortest S", "of the clips", seconds, Load.shortest_s, options={"dest": "shortest_s"}),
    Flag("--longest S", "", seconds, Load.longest_s, options={"dest": "longest_s"}),
    Flag("--slots N", "default: as configured", positive, Load.slots),
    beam_size(GREEDY, Load.beam_size),
)
