"""Requests that were answered and wait to be answered again, within a limit."""

import collections
import dataclasses
import itertools
import os
from contextlib import suppress
from pathlib import Path

from tritonclient.grpc import service_pb2

from serve.contract.messages import Transcript
from serve.gateway.checks import LENGTH
from serve.gateway.upstream.outgoing import Outgoing
from serve.wire.tensors import INPUTS

_NOT_ASKED = {  # of the reference: it costs time, and changes no word
    name.upper()
    for name in (
        *("word_timestamps", "try_word_timestamps", "token_logprobs", "low_confidence"),
        *("diarize", "num_speakers", "min_speakers", "max_speakers"),
        *("known_speaker_names", "known_speaker_references", "beam_size"),
    )
}
_BEAM = "BEAM_SIZE"
# Memory of a sample beside its request: about what Python takes, from above.
_SAMPLE_BYTES, _SEGMENT_BYTES, _TOKEN_BYTES, _CHARACTER_BYTES = 4096, 512, 40, 4


@dataclasses.dataclass(eq=False)
class Sample:
    """A request and its answer."""

    request: Outgoing  # in one part; its upload is a link of the sample's own
    served: Transcript  # without words and probabilities of tokens
    size: int  # bytes, of the request, its file and the answer
    lost: int = 0  # times that a server had it and was lost

    def remove(self) -> None:
        """Let go of its file."""
        if self.request.upload:
            with suppress(OSError):
                os.unlink(self.request.upload)


class Pending:
    """Samples that wait, of which the oldest go first and are dropped first.

    Args:
        max_bytes: of all of them.
        folder: for links to files, in which these lie.
    """

    def __init__(self, max_bytes: int, folder: Path) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._folder = folder
        self._numbers = itertools.count(1)
        self._samples: collections.deque[Sample] = collections.deque()

    def __len__(self) -> int:
        """Count them."""
        return len(self._samples)

    def add(self, request: Outgoing, served: Transcript) -> int:
        """Keep a request; return how many were dropped for want of room, itself perhaps.

        Raises:
            OSError: its file cannot be kept.
        """
        size = sum(map(len, request.parts)) + _answer_bytes(served)
        if request.upload:
            size += os.stat(request.upload).st_size
        if size > self._max_bytes:
            return 1
        upload = None
        if request.upload:
            upload = str(self._folder / f"shadow-{next(self._numbers)}")
            os.link(request.upload, upload)
        kept = dataclasses.replace(request, parts=[b"".join(request.parts)], upload=upload)
        return self.put_back(Sample(kept, _compared_part(served), size))

    def put_back(self, sample: Sample) -> int:
        """Let a sample wait behind the others; return how many were dropped for want of room."""
        self._samples.append(sample)
        self.bytes += sample.size
        dropped = 0
        while self.bytes > self._max_bytes:
            self.take().remove()
            dropped += 1
        return dropped

    def take(self) -> Sample:
        """Take the oldest out."""
        sample = self._samples.popleft()
        self.bytes -= sample.size
        return sample


def _compared_part(served: Transcript) -> Transcript:
    """Return an answer without its words and the probabilities of its tokens."""
    segments = (
        dataclasses.replace(segment, words=None, token_logprobs=None) for segment in served.segments
    )
    return dataclasses.replace(served, segments=tuple(segments))


def _answer_bytes(served: Transcript) -> int:
    """Estimate the memory of `_compared_part`."""
    tokens = len(served.tokens) + sum(len(segment.tokens) for segment in served.segments)
    segments = _SEGMENT_BYTES * len(served.segments)
    text = 2 * _CHARACTER_BYTES * len(served.text)  # once more in the segments
    return _SAMPLE_BYTES + segments + _TOKEN_BYTES * tokens + text


def for_reference(message: bytes, beam_size: int) -> bytes:
    """Make the reference's request of a serialised `ModelInferRequest`, whose text it leaves alone.

    Args:
        message: without its model's name.
        beam_size: 0: as it came.
    """
    request = service_pb2.ModelInferRequest.FromString(message)
    del request.outputs[:]
    not_asked = _NOT_ASKED if beam_size else _NOT_ASKED - {_BEAM}
    raw = len(request.raw_input_contents) > 0
    for index in reversed(range(len(request.inputs))):
        if request.inputs[index].name in not_asked:
            del request.inputs[index]
            if raw:
                del request.raw_input_contents[index]
    if beam_size:
        number = request.inputs.add(name=_BEAM, datatype=INPUTS[_BEAM].datatype, shape=[1])
        if raw:
            request.raw_input_contents.append(beam_size.to_bytes(LENGTH.size, "little"))
        else:
            number.contents.int_contents.append(beam_size)
    return bytes(request.SerializeToString())
