"""Requests of noise with forced lengths over gRPC, checked where they arrive."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import soundfile

from eval.load import ClientProcesses
from serve.contract.errors import EarshotError
from serve.wire.client import Client

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


@contextlib.contextmanager
def noise_requests(
    address: str, specs: Sequence[RequestSpec], process: int
) -> Iterator[Callable[[int], Answer]]:
    """Give a function that sends the n-th request, each spec with a clip of its own in turn."""
    clips = [(wav(spec.seconds, process * len(specs) + i), spec) for i, spec in enumerate(specs)]
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
