"""A closed loop of requests over gRPC, from processes of their own.

Client and server would otherwise share one interpreter's time. Each process has its own channel
and a thread for each request that it keeps in flight. Every answer is looked at where it arrives,
and what is passed on is small.
"""

import contextlib
import dataclasses
import io
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.synchronize import Event

import numpy as np
import soundfile

from eval.processes import ChildProcess, Send, wait_for_any
from serve.contract.errors import DeadlineError, EarshotError
from serve.wire.client import Client

STALL_S = 120.0  # nothing was answered for so long: the server is stuck
MOST_PROCESSES = 6
_RATE = 16_000


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


def wav(seconds: float, seed: int) -> bytes:
    """Make a file of noise."""
    samples = np.random.default_rng(seed).normal(0, 0.1, round(seconds * _RATE))
    file = io.BytesIO()
    soundfile.write(file, samples.clip(-1, 1), _RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


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


def processes_for(requests: int, most: int = MOST_PROCESSES) -> int:
    """Return how many processes keep so many requests in flight: at most half of the cores."""
    return max(1, min(most, (os.cpu_count() or 1) // 2, requests))


class Clients:
    """Keeps requests in flight until told to stop; use in a `with` block.

    Args:
        address: of the server's gRPC endpoint.
        specs: of the requests, which each process sends in turn, a clip of its own for each.
        in_flight: requests in flight at any time.
        processes: how many keep them so.
    """

    def __init__(
        self, address: str, specs: Sequence[RequestSpec], in_flight: int, processes: int
    ) -> None:
        self.answered = 0
        self.tokens = 0  # of the answers
        self._stop = multiprocessing.get_context("spawn").Event()
        self._running: list[ChildProcess] = []
        self._children = contextlib.ExitStack()
        for i in range(processes):
            threads = in_flight // processes + (i < in_flight % processes)
            arguments = (address, tuple(specs), threads, i, self._stop)
            child = ChildProcess(f"client process {i}", _keep_in_flight, arguments, log=None)
            self._running.append(self._children.enter_context(child))
        self.pids = tuple(child.pid for child in self._running)

    def __enter__(self) -> "Clients":
        """Return itself; leaving the block ends the processes."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, whatever they are at."""
        self._stop.set()
        self._children.close()

    def answers(self) -> list[Answer]:
        """Wait for answers; returns at least one, or none once all processes have ended.

        Raises:
            EarshotError: a request failed, or its answer is wrong.
            UnavailableError: a process died.
            DeadlineError: nothing came for too long.
        """
        answers: list[Answer] = []
        while self._running and not answers:
            ready = wait_for_any(self._running, STALL_S)
            if not ready:
                raise DeadlineError(f"no request was answered for {STALL_S:.0f} s")
            for child in ready:
                answer: Answer | None = child.receive(STALL_S)
                if answer is None:
                    self._running.remove(child)
                else:
                    answers.append(answer)
        self.answered += len(answers)
        self.tokens += sum(answer.spec.tokens for answer in answers)
        return answers

    def finish(self) -> None:
        """Send no more and wait for what is in flight.

        Raises:
            EarshotError: see `answers`.
        """
        self._stop.set()
        while self.answers():
            pass


def _keep_in_flight(
    send: Send,
    address: str,
    specs: tuple[RequestSpec, ...],
    threads: int,
    seed: int,
    stop: Event,
) -> None:
    """Do a client process's work: `threads` requests in flight until told to stop.

    Raises:
        EarshotError: a request failed, or its answer is wrong; the others are not waited for.
    """
    clips = [(wav(spec.seconds, seed * len(specs) + i), spec) for i, spec in enumerate(specs)]

    def request_loop(client: Client, first: int) -> None:
        for number in itertools.count(first):
            if stop.is_set():
                return
            send(timed_request(client, *clips[number % len(clips)]))

    with Client(address) as client:
        pool = ThreadPoolExecutor(threads)
        loops = [pool.submit(request_loop, client, i) for i in range(threads)]
        done, _ = wait(loops, return_when=FIRST_EXCEPTION)
        for loop in done:
            loop.result()
