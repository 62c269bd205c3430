"""Load on a real server over gRPC, WAV in and text out: on one device, and on several.

What is timed is what a client sees: sending WAV, the gateway, Triton, decoding the audio, log-mel,
encoder, decoder, text, and the way back. Requests are noise with forced lengths from processes of
their own, and every answer is checked where it arrives.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from eval.bench.plan import Plan
from eval.bench.table import Measurement, percentiles_ms
from eval.bench.workloads import REQUEST_S, REQUEST_TOKENS, THROUGHPUT_TOKENS, WARM_REQUESTS
from eval.clients import wav
from eval.config import Config, changed
from eval.load import ClientProcesses, processes_for
from eval.record import Check, Say
from eval.server import RunningServer, by_role, cpu_s, running
from serve.contract.config import RuntimeConfig
from serve.contract.devices import names_of
from serve.contract.errors import EarshotError
from serve.speech.features import SAMPLE_RATE, WINDOW_S
from serve.wire.client import Client

SYSTEM = "earshot, through Triton"
_CLIPS = 4  # different ones in each client process
COUNTED = tuple(f"earshot_{name}_total" for name in ("windows", "retries", "tokens"))
MIN_EFFICIENCY = 0.975  # of the first figure's throughput, for each engine
SHORTEST_S, LONGEST_S = 10.0, 30.0  # of the clips of a scaling
LENGTHS = 16  # different ones
TOKENS_PER_S = 128 / 30  # as in the bench's throughput
_PROCESSES = 4  # of clients, for each engine
_GATEWAY = "gateway"
_ROLES = {_GATEWAY: _GATEWAY, "tritonserver": "tritonserver", "whisper": "engine"}

# ---------------------------------------------------------------- requests


@dataclasses.dataclass(frozen=True)
class RequestSpec:
    """The content of each request."""

    seconds: float  # of noise, as a WAV file's bytes: 16 bits, 16 kHz, mono
    tokens: int  # forced, so that a window's answer has text


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request that has ended as it should."""

    ended_s: float  # by the monotonic clock, which all processes of a machine share
    latency_s: float
    spec: RequestSpec


def noise(seconds: float, seed: int) -> bytes:
    """Make a WAV file of noise."""
    samples = np.random.default_rng(seed).normal(0, 0.1, round(seconds * SAMPLE_RATE))
    return wav(samples.astype(np.float32))


def timed_request(client: Client, audio: bytes, spec: RequestSpec) -> Answer:
    """Send one request and wait for its answer.

    Raises:
        EarshotError: it failed, or the answer is not that of the whole clip.
    """
    began = time.monotonic()
    transcript = client.transcribe(audio, language="en", timestamps=False, max_tokens=spec.tokens)
    ended = time.monotonic()
    if not transcript.text or transcript.duration != spec.seconds:
        raise EarshotError(
            f"an answer of {len(transcript.text)} characters to {transcript.duration:.3f} s of "
            f"sound; expected text for {spec.seconds} s"
        )
    return Answer(ended, ended - began, spec)


@contextlib.contextmanager
def noise_requests(
    address: str, specs: Sequence[RequestSpec], process: int
) -> Iterator[Callable[[int], Answer]]:
    """Give a function that sends the n-th request, each spec with a clip of its own in turn."""
    clips = [(noise(spec.seconds, process * len(specs) + i), spec) for i, spec in enumerate(specs)]
    with Client(address) as client:
        yield lambda number: timed_request(client, *clips[number % len(clips)])


def clients_of(
    address: str, specs: Sequence[RequestSpec], in_flight: int, processes: int
) -> ClientProcesses[Answer]:
    """Return processes that keep such requests in flight."""
    return ClientProcesses(noise_requests, (address, tuple(specs)), in_flight, processes)


def tokens_of(answers: Sequence[Answer]) -> int:
    """Count the tokens of answers."""
    return sum(answer.spec.tokens for answer in answers)


# ---------------------------------------------------------------- one device


def through_server(
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
    log = server.server_log.read_text(encoding="utf-8", errors="replace")
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
    audio = noise(REQUEST_S, 0)
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


# ---------------------------------------------------------------- several devices


def scaling_specs() -> list[RequestSpec]:
    """Return requests whose lengths lie evenly between the shortest and the longest."""
    lengths = np.linspace(SHORTEST_S, LONGEST_S, LENGTHS)
    return [RequestSpec(s, round(s * TOKENS_PER_S)) for s in (round(4 * x) / 4 for x in lengths)]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Figures of a server under the load."""

    device: str
    engines: int
    rtfx: float  # seconds of audio, before padding, for each second
    requests_per_s: float
    seconds: float
    p50_ms: float
    p99_ms: float
    cores: dict[str, float]  # that were busy, by kind of process; those of its kind together
    cpu_s_per_audio_hour: dict[str, float]
    busiest_thread: dict[str, float]  # of a kind's processes, its share of a core

    @property
    def server_cores(self) -> float:
        """Sum the cores that the server kept busy, its clients apart."""
        return sum(cores for kind, cores in self.cores.items() if kind != "clients")

    def __str__(self) -> str:
        """Write a line of the report."""
        cores = ", ".join(f"{kind} {value:.2f}" for kind, value in self.cores.items())
        threads = ", ".join(f"{kind} {value:.2f}" for kind, value in self.busiest_thread.items())
        return (
            f"{self.device}: {self.rtfx:.0f} RTFx on {self.engines} engines, "
            f"{self.requests_per_s:.1f} requests/s, p50 {self.p50_ms:.0f} ms, "
            f"p99 {self.p99_ms:.0f} ms; cores busy: {cores}; busiest thread: {threads}"
        )


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The growth of throughput with the engines, and where the host would end it."""

    figures: tuple[Figure, ...]
    # Throughput of the last figure by that of the first, and by that and the ratio of engines.
    ratio: float
    efficiency: float
    cores: int
    # Engines whose load would keep the gateway's busiest thread, one of an engine's process, and
    # all cores just busy, by the last figure; more would wait for the host.
    gateway_thread_binds_above: float
    cores_bind_above: float

    @property
    def check(self) -> Check:
        """Check that each engine adds as much as it has to."""
        name = f"each engine adds at least {MIN_EFFICIENCY:.1%} of the first one's throughput"
        return Check(name, self.efficiency >= MIN_EFFICIENCY, f"{self.efficiency:.1%}")

    def __str__(self) -> str:
        """Write lines of the report."""
        last = self.figures[-1]
        return (
            f"{self.ratio:.3f} x the throughput with {last.engines} engines, "
            f"{100 * self.efficiency:.1f} % of what as many single ones had\n"
            f"the gateway's busiest thread has a core's work at "
            f"{self.gateway_thread_binds_above:.1f} engines, the server's processes that of "
            f"{self.cores} cores at {self.cores_bind_above:.1f}"
        )


def measure_scaling(
    config: Config,
    folder: Path,
    each: Sequence[RuntimeConfig],
    plan: Plan,
    progress: Say,
) -> Scaling:
    """Start a server with each of these runtimes in turn and put the load on it.

    Args:
        config: how to serve.
        folder: an engine with end-of-text suppressed, as `write_engine` writes it.
        each: how to run it, `counted`; the first is what the last is compared with.
        plan: how many requests are in flight for each engine, and for how long.
        progress: gets a line at a time.

    Raises:
        EarshotError: as of `through_server`.
    """
    figures = []
    for runtime in each:
        server_config = dataclasses.replace(config, runtime=runtime)
        figures.append(_measure(server_config, folder, plan, progress))
        progress(str(figures[-1]))
    return scaling_of(figures, os.cpu_count() or 1)


def scaling_of(figures: Sequence[Figure], cores: int) -> Scaling:
    """Compute what the figures say of more engines, on a host of so many cores."""
    first, last = figures[0], figures[-1]
    ratio = last.rtfx / first.rtfx
    return Scaling(
        tuple(figures),
        ratio,
        ratio * first.engines / last.engines,
        cores,
        last.engines / last.busiest_thread[_GATEWAY],
        last.engines * cores / last.server_cores,
    )


def _measure(config: Config, folder: Path, plan: Plan, progress: Say) -> Figure:
    engines = len(names_of(config.runtime.device))
    in_flight = engines * plan.clients
    roomy = changed(
        served(config, in_flight),
        "server",
        max_inflight=max(config.server.max_inflight, in_flight),
        max_inflight_mb=max(config.server.max_inflight_mb, 2 * in_flight),
    )
    with running(roomy, engine=str(folder)) as server:
        processes = processes_for(in_flight, _PROCESSES * engines)
        progress(
            f"{config.runtime.device}: {in_flight} requests in flight from {processes} processes"
        )
        before = server.settled(*COUNTED)
        with clients_of(server.grpc, scaling_specs(), in_flight, processes) as clients:
            while len(clients.answered) < 2 * in_flight:
                clients.answers()
            kept, meter, began = list[Answer](), _Meter(server, clients.pids), time.monotonic()
            while (wall_s := time.monotonic() - began) < plan.seconds:
                kept += clients.answers()
            cores, threads = meter.cores(wall_s)
            clients.finish()
        check_counters(server, before, clients.answered)
    audio_s = sum(answer.spec.seconds for answer in kept)
    latency = percentiles_ms([answer.latency_s for answer in kept])
    return Figure(
        config.runtime.device,
        engines,
        audio_s / wall_s,
        len(kept) / wall_s,
        wall_s,
        latency["p50_ms"],
        latency["p99_ms"],
        cores,
        {kind: 3600 * busy * wall_s / audio_s for kind, busy in cores.items()},
        threads,
    )


class _Meter:
    """Processor time from when it is made on: of the server's processes, and of its clients."""

    def __init__(self, server: RunningServer, clients: Sequence[int]) -> None:
        self._processes = list(_processes(server, clients))
        self._began = self._spent()

    def cores(self, wall_s: float) -> tuple[dict[str, float], dict[str, float]]:
        """Measure the cores that were busy meanwhile, and the share of the busiest thread."""
        cores: dict[str, float] = {}
        busiest: dict[str, float] = {}
        for key, (spent, threads) in self._spent().items():
            kind, began = key[0], self._began[key]
            cores[kind] = cores.get(kind, 0.0) + (spent - began[0]) / wall_s
            most = max(s - began[1].get(thread, 0.0) for thread, s in threads.items()) / wall_s
            busiest[kind] = max(busiest.get(kind, 0.0), most)
        return cores, busiest

    def _spent(self) -> dict[tuple[str, int], tuple[float, dict[int, float]]]:
        """Return seconds so far by kind and process: of all of it, and by thread."""
        spent = {}
        for kind, process in self._processes:
            threads = {
                thread.id: thread.user_time + thread.system_time for thread in process.threads()
            }
            spent[kind, process.pid] = (cpu_s(process), threads)
        return spent


def _processes(
    server: RunningServer, clients: Sequence[int]
) -> Iterator[tuple[str, psutil.Process]]:
    """Yield processes of server and clients with their roles, but those that read one file."""
    for pid in clients:
        yield "clients", psutil.Process(pid)
    for role, process in by_role(server.process.pid):
        if role in _ROLES:
            yield _ROLES[role], process
