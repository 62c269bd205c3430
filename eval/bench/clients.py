"""A closed loop of requests over gRPC, from processes of their own.

Client and server would otherwise share one interpreter's time. Each process has its own channel
and a thread for each request that it keeps in flight. Every answer is looked at where it arrives,
and what is passed on is small.
"""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import soundfile

from serve.errors import DeadlineError, EarshotError, UnavailableError
from serve.triton.client import Client

STALL_S = 120.0  # nothing was answered for so long: the server is stuck
STOP_S = 30.0  # for a process that has nothing left to do
MOST_PROCESSES = 6
_RATE = 16_000
_CLIPS = 4  # different ones in each process


@dataclasses.dataclass(frozen=True)
class RequestSpec:
    """What each request sends and asks for."""

    seconds: float  # of noise, as a WAV file's bytes: 16 bits, 16 kHz, mono
    tokens: int  # forced, so that a window's answer has text

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `Request` beside the audio."""
        return {"language": "en", "timestamps": False, "max_tokens": self.tokens}


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request that has ended as it should."""

    ended_s: float  # by the monotonic clock, which all processes of a machine share
    latency_s: float


def wav(seconds: float, seed: int) -> bytes:
    """A file of noise."""
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
    transcript = client.transcribe(audio, **spec.options)
    ended = time.monotonic()
    if not transcript.text or transcript.duration != spec.seconds:
        raise EarshotError(
            f"an answer of {len(transcript.text)} characters to {transcript.duration:.3f} s of "
            f"sound; expected text for {spec.seconds} s"
        )
    return Answer(ended, ended - began)


def processes_for(requests: int) -> int:
    """How many processes keep so many requests in flight: at most half of the cores."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, requests))


class Clients:
    """Keeps requests in flight until told to stop; use in a `with` block.

    Args:
        address: of the server's gRPC endpoint.
        spec: of each request.
        in_flight: requests in flight at any time.
    """

    def __init__(self, address: str, spec: RequestSpec, in_flight: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.answered = 0
        self._stop = context.Event()
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        count = processes_for(in_flight)
        for i in range(count):
            ours, theirs = context.Pipe(duplex=False)
            threads = in_flight // count + (i < in_flight % count)
            process = context.Process(
                target=_client, args=(address, spec, threads, i, self._stop, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> "Clients":
        """Itself; leaving the block ends the processes."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, whatever they are at."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(STOP_S)
        for pipe in self._pipes:
            pipe.close()

    def answers(self) -> list[Answer]:
        """Wait for answers; returns at least one, or none once all processes have ended.

        Raises:
            EarshotError: a request failed, or its answer is wrong.
            UnavailableError: a process died.
            DeadlineError: nothing came for too long.
        """
        found: list[Answer] = []
        while self._pipes and not found:
            ready = connection.wait(self._pipes, STALL_S)
            if not ready:
                raise DeadlineError(f"no request was answered for {STALL_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found += self._read(pipe)
        self.answered += len(found)
        return found

    def _read(self, pipe: Connection) -> Iterator[Answer]:
        try:
            message: Answer | EarshotError | None = pipe.recv()
        except EOFError:
            raise UnavailableError("a process of clients died; see its output") from None
        if isinstance(message, EarshotError):
            raise message
        if message is None and not self._stop.is_set():
            raise UnavailableError("a process of clients ended early; see its output")
        if message is None:
            self._pipes.remove(pipe)
            pipe.close()
        else:
            yield message

    def finish(self) -> None:
        """Send no more and wait for what is in flight.

        Raises:
            EarshotError: see `answers`.
        """
        self._stop.set()
        while self.answers():
            pass


def _client(
    address: str, spec: RequestSpec, threads: int, seed: int, stop: Event, pipe: Connection
) -> None:
    """Entry of a process: `threads` requests in flight until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    clips = [wav(spec.seconds, seed * _CLIPS + i) for i in range(_CLIPS)]
    lock = threading.Lock()

    def send(message: Answer | EarshotError | None) -> None:
        with lock, contextlib.suppress(BrokenPipeError):  # the parent has given up
            pipe.send(message)

    def loop(number: int) -> None:
        try:
            while not stop.is_set():
                send(timed_request(client, clips[number % _CLIPS], spec))
        except EarshotError as error:
            stop.set()
            send(error)

    with Client(address) as client:
        running = [threading.Thread(target=loop, args=(i,)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    send(None)
