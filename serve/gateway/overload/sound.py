"""How long a request's audio is, as far as that can be told before it is decoded."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from tritonclient.grpc import service_pb2

from serve.gateway.kserve.checks import LENGTH
from serve.speech.containers import pcm16_header
from serve.speech.kinds import kind_of
from serve.speech.rate import SAMPLE_RATE

HEAD_BYTES = 2**16
"""So many of a file's first bytes are looked at."""

_BYTES_PER_S = 8_000.0  # of files of a kind of which none has been answered yet
_LEARNED = 0.1  # of each answer


@dataclasses.dataclass(frozen=True)
class AudioLength:
    """What is known of a request's audio."""

    seconds: float | None  # None: `DurationEstimator` guesses by kind and size
    kind: str = ""
    size: int = 0  # bytes


def of_file(head: bytes, size: int) -> AudioLength:
    """Look at a file of so many bytes, of which the first `HEAD_BYTES` are here."""
    header = pcm16_header(head)
    if header is None:
        return AudioLength(None, kind_of(head), size)
    # All bytes, not those declared: the declared size may be that of a first write or a first part.
    samples = (size - header.begin) / 2 / header.channels
    return AudioLength(samples / max(1, header.rate))


def of_tensors(
    request: service_pb2.ModelInferRequest, raw: Sequence[memoryview | bytes]
) -> AudioLength | None:
    """Look at a request of KServe's, which was checked; None: it has no audio.

    Args:
        request: without its raw tensors.
        raw: those, in the order of the inputs; empty where the inputs hold their values.
    """
    inputs = {tensor.name: at for at, tensor in enumerate(request.inputs)}
    if "SAMPLES" in inputs:
        count = int(np.prod(request.inputs[inputs["SAMPLES"]].shape))
        return AudioLength(count / _rate(request, raw, inputs))
    if "AUDIO" not in inputs:
        return None
    at = inputs["AUDIO"]
    file = raw[at][LENGTH.size :] if raw else request.inputs[at].contents.bytes_contents[0]
    return of_file(bytes(file[:HEAD_BYTES]), len(file))


def _rate(
    request: service_pb2.ModelInferRequest,
    raw: Sequence[memoryview | bytes],
    inputs: dict[str, int],
) -> int:
    if (at := inputs.get("SAMPLE_RATE")) is None:  # it will be refused
        return SAMPLE_RATE
    values = np.frombuffer(raw[at], np.int32) if raw else request.inputs[at].contents.int_contents
    return max(1, int(values[0]))


class DurationEstimator:
    """Guesses how long files are by their kinds and sizes, and learns from answers."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[str, float] = {}

    def seconds(self, sound: AudioLength) -> float:
        """Return how many seconds of audio there are, or may be."""
        if sound.seconds is not None:
            return sound.seconds
        return sound.size / self._bytes_per_s.get(sound.kind, _BYTES_PER_S)

    def learn(self, sound: AudioLength, seconds: float) -> None:
        """Note how much it was."""
        if sound.seconds is None and sound.size and seconds > 0:
            one = sound.size / seconds
            before = self._bytes_per_s.get(sound.kind, one)
            self._bytes_per_s[sound.kind] = before + _LEARNED * (one - before)
