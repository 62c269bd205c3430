"""Requests that were answered and wait to be answered again, within a limit."""

import collections
import dataclasses
import itertools
import os
from contextlib import suppress
from pathlib import Path

from tritonclient.grpc import service_pb2

from serve.contract.messages import Transcript
from serve.gateway.engine import EngineRequest
from serve.gateway.kserve.messages import LENGTH
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


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A request and its answer."""

    request: EngineRequest  # in one part; its upload is a link of the sample's own
    served: Transcript
    size: int  # bytes, of the request and its file

    def remove(self) -> None:
        """Let go of its file."""
        if self.request.audio_file:
            with suppress(OSError):
                os.unlink(self.request.audio_file)


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

    def add(self, request: EngineRequest, served: Transcript) -> int:
        """Keep a request; return how many were dropped for want of room, itself perhaps.

        Raises:
            OSError: its file cannot be kept.
        """
        size = sum(map(len, request.parts))
        if request.audio_file:
            size += os.stat(request.audio_file).st_size
        if size > self._max_bytes:
            return 1
        upload = None
        if request.audio_file:
            upload = str(self._folder / f"shadow-{next(self._numbers)}")
            os.link(request.audio_file, upload)
        kept = dataclasses.replace(request, parts=[b"".join(request.parts)], audio_file=upload)
        self._samples.append(Sample(kept, served, size))
        self.bytes += size
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

    def put_back(self, sample: Sample) -> None:
        """Let a sample be the next one again."""
        self._samples.appendleft(sample)
        self.bytes += sample.size


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
