"""Load on a real server over gRPC, WAV in and text out: on one device, and on several.

Times are those that a client sees: sending WAV, the gateway, Triton, decoding the audio, log-mel,
encoder, decoder, text, and the way back. Requests are noise with forced lengths, sent by separate
processes, which check that every answer has its length.
"""

import contextlib
import dataclasses
import functools
import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile

from eval.bench import BenchPlan
from eval.bench.table import OURS, Measurement, measure_latency, percentiles_ms
from eval.bench.workloads import REQUEST_S, REQUEST_TOKENS, THROUGHPUT_TOKENS
from eval.config import EvaluationProduct, changed
from eval.load import MAX_PROCESSES, RequestProcesses, processes_for
from eval.record import Say
from eval.server import RunningServer, running
from serve.contract.config import RuntimeConfig
from serve.contract.devices import names_of
from serve.contract.errors import EarshotError
from serve.speech.features import SAMPLE_RATE, WINDOW_S
from serve.wire.client import TritonClient

SYSTEM = f"{OURS}, through Triton"
LENGTHS_S = range(10, 31)  # of the clips for several devices
_CLIPS = 4  # clips of one length in each client process


@dataclasses.dataclass(frozen=True)
class NoiseClip:
    """The content of a request: noise as a WAV file, and the forced number of tokens."""

    seconds: float
    tokens: int


# ---------------------------------------------------------------- requests


def noise(seconds: float, seed: int) -> bytes:
    """Make a WAV file of noise."""
    samples = np.random.default_rng(seed).normal(0, 0.1, round(seconds * SAMPLE_RATE))
    file = io.BytesIO()
    soundfile.write(file, samples.clip(-1, 1), SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def timed_request(client: TritonClient, audio: bytes, clip: NoiseClip) -> float:
    """Send one request, wait for its answer, and return the seconds.

    Raises:
        EarshotError: it failed, or the answer is not of the whole clip and its number of tokens.
    """
    began_s = time.monotonic()
    transcript = client.transcribe(audio, language="en", timestamps=False, max_tokens=clip.tokens)
    latency_s = time.monotonic() - began_s
    tokens, text = len(transcript.tokens), transcript.text
    if not text or tokens != clip.tokens or transcript.duration != clip.seconds:
        raise EarshotError(
            f"an answer of {tokens} tokens, {text!r}, to {transcript.duration:g} s of sound; "
            f"expected text of {clip.tokens} tokens for {clip.seconds:g} s"
        )
    return latency_s


@contextlib.contextmanager
def noise_requests(
    address: str, clips: Sequence[NoiseClip], process: int
) -> Iterator[Callable[[int], tuple[float, NoiseClip]]]:
    """Give a function that sends the n-th request, with each clip in turn."""
    files = [noise(clip.seconds, process * len(clips) + i) for i, clip in enumerate(clips)]
    with TritonClient(address) as client:

        def send(number: int) -> tuple[float, NoiseClip]:
            index = number % len(clips)
            return timed_request(client, files[index], clips[index]), clips[index]

        yield send


def single_try(config: EvaluationProduct, engine: Path, in_flight: int) -> EvaluationProduct:
    """Configure a server that takes `in_flight` requests and decodes each window once.

    Random weights are never sure, so every window would be decoded again at each higher
    temperature, and might pass for silence or for a loop.
    """
    config = changed(
        dataclasses.replace(config, engine=str(engine)),
        "transcriber",
        temperatures=(0.0,),
        logprob_threshold=-1e9,
        compression_ratio_threshold=1e9,
        vad="off",  # its audio is noise
        no_speech_threshold=1.0,
        max_pending=max(config.transcriber.max_pending, in_flight),
    )
    return changed(
        config,
        "server",
        max_inflight=max(config.server.max_inflight, in_flight),
        max_inflight_mb=max(config.server.max_inflight_mb, 2 * in_flight),
    )


def load_server(
    server: RunningServer, clips: Sequence[NoiseClip], in_flight: int, seconds: float, engines: int
) -> Measurement:
    """Keep requests in flight; measure for `seconds` once twice as many are answered.

    Raises:
        EarshotError: a request failed, or its answer is wrong.
    """
    warm, counted = 0, list[tuple[float, NoiseClip]]()
    processes = processes_for(in_flight, MAX_PROCESSES * engines)
    arguments = (server.grpc, tuple(clips))
    with RequestProcesses(noise_requests, arguments, in_flight, processes) as clients:
        while warm < 2 * in_flight:
            warm += len(clients.answers())
        cpu_s, began_s = server.cpu_s(), time.monotonic()
        while (wall_s := time.monotonic() - began_s) < seconds:
            counted += clients.answers()
        cores = {
            f"{role}_cores": (now_s - cpu_s.get(role, 0.0)) / wall_s
            for role, now_s in server.cpu_s().items()
        }
        clients.finish()
    figures = {
        "requests_per_s": len(counted) / wall_s,
        **percentiles_ms([latency_s for latency_s, _ in counted]),
        "requests": len(counted),
        "in_flight": in_flight,
        "seconds": wall_s,
        **cores,
    }
    rtfx = sum(clip.seconds for _, clip in counted) / wall_s
    return Measurement("throughput", SYSTEM, rtfx, "RTFx", figures=figures)


# ---------------------------------------------------------------- one device


def through_server(
    config: EvaluationProduct, folder: Path, plan: BenchPlan, say: Say
) -> Iterator[Measurement]:
    """Start a server, load it, then send single requests; yield a row of each.

    Args:
        config: the config of runtime and server.
        folder: an engine with end-of-text suppressed, as `random_engine` builds it.
        plan: the duration of the load, and the number of single requests.
        say: receives lines of progress.

    Raises:
        EarshotError: the server did not start, or as `load_server`.
    """
    in_flight = config.runtime.slots + config.runtime.encoder_batch
    began_s = time.perf_counter()
    with running(single_try(config, folder, in_flight)) as server:
        ready_s = time.perf_counter() - began_s
        yield Measurement("start", SYSTEM, ready_s, "s", detail="from engine folder to ready")
        say(f"throughput through Triton: {in_flight} requests in flight")
        clips = [NoiseClip(WINDOW_S, THROUGHPUT_TOKENS)] * _CLIPS
        row = load_server(server, clips, in_flight, plan.seconds, engines=1)
        detail = f"30 s of sound as WAV, {THROUGHPUT_TOKENS} tokens"
        yield dataclasses.replace(row, detail=detail)
        say("one request at a time through Triton")
        clip = NoiseClip(REQUEST_S, REQUEST_TOKENS)
        with TritonClient(server.grpc) as client:
            send = functools.partial(timed_request, client, noise(REQUEST_S, 0), clip)
            detail = f"10 s as WAV, {REQUEST_TOKENS} tokens"
            yield measure_latency(SYSTEM, send, plan.requests, None, detail)


# ---------------------------------------------------------------- several devices


def measure_scaling(
    config: EvaluationProduct,
    folder: Path,
    runtimes: Sequence[RuntimeConfig],
    seconds: float,
    say: Say,
) -> Iterator[Measurement]:
    """Start a server with each of these runtimes in turn and load it; yield a row of each.

    Args:
        config: the server's config.
        folder: an engine with end-of-text suppressed, as `random_engine` builds it.
        runtimes: with their devices counted.
        seconds: the duration of each load.
        say: receives lines of progress.

    Raises:
        EarshotError: a server did not start, or as `load_server`.
    """
    tokens_per_s = THROUGHPUT_TOKENS / WINDOW_S
    clips = [NoiseClip(length_s, round(length_s * tokens_per_s)) for length_s in LENGTHS_S]
    for runtime in runtimes:
        engines = len(names_of(runtime.device))
        in_flight = engines * 4 * runtime.slots  # the gateway's queue is never empty
        served = single_try(dataclasses.replace(config, runtime=runtime), folder, in_flight)
        say(f"{runtime.device}: {in_flight} requests in flight")
        with running(served) as server:
            row = load_server(server, clips, in_flight, seconds, engines)
        row.figures["engines"] = engines
        system = f"{SYSTEM}, {runtime.device}"
        detail = f"{min(LENGTHS_S)} to {max(LENGTHS_S)} s of sound as WAV"
        yield dataclasses.replace(row, system=system, detail=detail)
