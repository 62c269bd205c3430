"""Workloads throughput and latency through a real tritonserver: WAV in, text out, over gRPC.

What is timed is what a client sees: sending 0.96 MB of WAV, Triton, decoding the audio, log-mel,
encoder, decoder, text, JSON, and the way back. The server is started as `make serve` does it.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.bench.clients import Answer, RequestSpec, clients_of, timed_request, tokens_of, wav
from eval.bench.plan import Plan
from eval.bench.table import Measurement, percentiles_ms
from eval.bench.workloads import REQUEST_S, REQUEST_TOKENS, THROUGHPUT_TOKENS, WARM_REQUESTS
from eval.config import Config, changed
from eval.load import processes_for
from eval.record import Say
from eval.server import RunningServer, running
from serve.contract.errors import EarshotError
from serve.speech.features import WINDOW_S
from serve.wire.client import Client

SYSTEM = "earshot, through Triton"
_CLIPS = 4  # different ones in each client process
COUNTED = tuple(f"earshot_{name}_total" for name in ("windows", "retries", "tokens"))


def through_triton(
    config: Config, folder: Path, in_process: float | None, plan: Plan, progress: Say
) -> Iterator[Measurement]:
    """Start a server, put load on it, then single requests; a measurement of each.

    Args:
        config: how to run and serve it.
        folder: an engine with end-of-text suppressed, as `write_engine` writes it.
        in_process: throughput (RTFx) of the same runtime without a server, to compare with.
        plan: for how long the throughput is sustained and how many single requests count.

    Raises:
        EarshotError: the server did not start, a request failed, or the answers are not those of
            the windows that were sent.
    """
    in_flight = config.runtime.slots + config.runtime.encoder_batch
    config = served(config, in_flight)
    judged = config.transcriber
    progress(
        f"Triton: temperatures {list(judged.temperatures)}, so no window is decoded twice; "
        f"no_speech_threshold {judged.no_speech_threshold}, so none is silence; language named, "
        f"timestamps off; {judged.decode_workers} decode workers"
    )
    kernels, began = _kernels(), time.perf_counter()
    with running(config, engine=str(folder)) as server:
        ready_s = time.perf_counter() - began
        yield _start(server, ready_s, _kernels() - kernels)
        yield _throughput(server, in_flight, in_process, plan.seconds, progress)
        yield _latency(server, plan.requests, progress)


def served(config: Config, in_flight: int) -> Config:
    """Configure a server that takes `in_flight` requests and gives each window one try.

    Made-up weights are never sure of what they say, so every window would be decoded again at each
    higher temperature, and might pass for silence, or for a loop.
    """
    return changed(
        config,
        "transcriber",
        temperatures=(0.0,),
        logprob_threshold=-1e9,
        compression_ratio_threshold=1e9,  # what repeats itself goes on
        vad="off",  # its audio is noise
        no_speech_threshold=1.0,
        max_pending=max(config.transcriber.max_pending, in_flight),
    )


def _start(server: RunningServer, ready_s: float, compiled: int) -> Measurement:
    """Measure the time from an engine folder to the first request that may come."""
    log = server.log.read_text(encoding="utf-8", errors="replace")
    (model_s,) = (float(text) for text in re.findall(r"the engine is open after (\S+) s", log))
    detail = (
        f"engine folder to ready, {compiled} kernels compiled in it; {model_s:.1f} s of it to load "
        "torch, check and open the engine, and transcribe once"
    )
    return Measurement("start", SYSTEM, ready_s, "s", None, detail, {"model_s": model_s})


def _throughput(
    server: RunningServer, in_flight: int, in_process: float | None, seconds: float, progress: Say
) -> Measurement:
    """Measure clips of 30 s, `in_flight` of them in flight at any time."""
    processes = processes_for(in_flight)
    progress(
        f"throughput through Triton: {in_flight} requests in flight from {processes} processes"
    )
    before, kept = server.settled(*COUNTED), list[Answer]()
    specs = [RequestSpec(WINDOW_S, THROUGHPUT_TOKENS)] * _CLIPS
    with clients_of(server.grpc, specs, in_flight, processes) as clients:
        while len(clients.answered) < 2 * in_flight:
            clients.answers()
        busy, began = server.cpu_s(), time.monotonic()
        while (wall_s := time.monotonic() - began) < seconds:
            kept += clients.answers()
        busy = {name: spent - busy.get(name, 0.0) for name, spent in server.cpu_s().items()}
        clients.finish()
    check_counters(server, before, clients.answered)
    rate = len(kept) / wall_s
    p50, p99 = _percentiles(kept)
    figures = {"windows_per_s": rate, "seconds": wall_s, "p50_ms": p50, "p99_ms": p99}
    detail = (
        f"30 s of sound as WAV, {THROUGHPUT_TOKENS} tokens; {len(kept)} answers in {wall_s:.1f} s, "
        f"{in_flight} requests in flight, p50 {p50:.0f} ms, p99 {p99:.0f} ms; CPU a window: "
        + ", ".join(f"{name} {1e3 * spent / len(kept):.2f} ms" for name, spent in busy.items())
    )
    if in_process is not None:
        figures["of_in_process"] = rate * WINDOW_S / in_process
        detail = f"{100 * figures['of_in_process']:.0f} % of in process; {detail}"
    return Measurement("throughput", SYSTEM, rate * WINDOW_S, "RTFx", None, detail, figures)


def _latency(server: RunningServer, requests: int, progress: Say) -> Measurement:
    """Measure one clip of 10 s at a time."""
    progress("one request at a time through Triton")
    spec, before = RequestSpec(REQUEST_S, REQUEST_TOKENS), server.settled(*COUNTED)
    audio = wav(REQUEST_S, 0)
    with Client(server.grpc) as client:
        answers = [timed_request(client, audio, spec) for _ in range(WARM_REQUESTS + requests)]
    check_counters(server, before, answers)
    p50, p99 = _percentiles(answers[WARM_REQUESTS:])
    detail = f"p50 of {requests}, p99 {p99:.2f}; 10 s of sound as WAV, {REQUEST_TOKENS} tokens"
    figures = {"p50_ms": p50, "p99_ms": p99, "requests": requests}
    return Measurement("latency", SYSTEM, p50, "ms", None, detail, figures)


def _percentiles(answers: list[Answer]) -> tuple[float, float]:
    """Return p50 and p99 of their latency in ms."""
    percentiles = percentiles_ms([answer.latency_s for answer in answers])
    return percentiles["p50_ms"], percentiles["p99_ms"]


def check_counters(
    server: RunningServer, before: dict[str, float], answers: Sequence[Answer]
) -> None:
    """Check that each request was one window, decoded once, to its full length in tokens.

    Raises:
        EarshotError: the server's counters say otherwise.
    """
    after = server.settled(*COUNTED)
    moved = [after[name] - before[name] for name in COUNTED]
    expected = [len(answers), 0, tokens_of(answers)]
    if moved != expected:
        raise EarshotError(
            f"{len(answers)} answers cost the server {', '.join(COUNTED)} of {moved}; expected "
            f"{expected}"
        )


def _kernels() -> int:
    """Count the compiled kernels that Triton, the language, has on disk."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
