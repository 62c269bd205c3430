"""The Ray actor that has an engine and transcribes shards."""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow
from pyarrow import parquet

from serve.bulk import store
from serve.bulk.sharding import BulkOutput, Format, Shard
from serve.contract.codec import to_json
from serve.contract.config import Config
from serve.contract.errors import (
    AudioLimitError,
    CancelledError,
    DeviceError,
    EarshotError,
    OptionError,
    OverloadedError,
    shown,
)
from serve.contract.messages import Request, Transcript
from serve.speech.formats import render
from serve.transcriber.decoding_plan import MAX_AUDIO_MB, MIB
from serve.transcriber.open import open_transcriber

_RETRY_S = 0.1  # between attempts to submit a request while the transcriber is full


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """The outcome of a shard."""

    number: int
    files: int = 0  # transcribed or failed
    audio_s: float = 0.0  # transcribed audio
    undone: str = ""  # why another process has to repeat the shard
    refused: str = ""  # why no process can transcribe any shard


class ShardWorker:
    """An actor that transcribes shards, two at a time to keep the engine busy at their ends.

    Args:
        config: the configuration of the engine.
        request: the request for each file, without its audio.
        output: the folder and formats of the transcripts.
    """

    def __init__(self, config: Config, request: Request, output: BulkOutput) -> None:
        self._request, self._output = request, output
        self._timeout_s = config.transcriber.request_timeout_s
        self._pool = ThreadPoolExecutor(config.runtime.slots)
        self._device_failed = False
        self._refused = ""
        try:
            self._transcriber = open_transcriber(config)
        except EarshotError as error:
            # Each shard reports it: an exception in an actor's constructor prints a stack trace.
            self._refused = f"{error} (on {os.uname().nodename})"

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Transcribe a shard, unless it is done; convert a `Shard` row to a `ShardReport` row."""
        shard = Shard(int(row["number"]), tuple(row["files"]), tuple(row["places"]))
        return dataclasses.asdict(self._report(shard))

    def _report(self, shard: Shard) -> ShardReport:
        number, files = shard.number, shard.files
        if self._refused:
            return ShardReport(number, refused=self._refused)
        if self._device_failed:
            os._exit(1)  # only a new process has a working device
        try:
            if store.exists(self._output.transcripts(number)):
                return ShardReport(number, len(files))
            answers = [self._pool.submit(self._transcribe, file) for file in files]
            try:
                return self._collect(shard, answers)
            finally:
                for answer in answers:  # files that are not started if the shard is abandoned
                    answer.cancel()
        except EarshotError as error:  # the output or an option is wrong
            return ShardReport(number, refused=str(error))

    def _collect(self, shard: Shard, answers: Sequence[Future[Transcript]]) -> ShardReport:
        """Write the transcripts and errors of a shard's files."""
        number = shard.number
        places = dict(zip(shard.files, shard.places, strict=False))  # some runs have none
        lines: list[str] = []
        failures: list[str] = []
        audio_s = 0.0
        for file, answer in zip(shard.files, answers, strict=True):
            try:
                transcript = answer.result()
            except OptionError:
                raise
            except (DeviceError, CancelledError) as error:
                self._device_failed = True
                return ShardReport(number, undone=str(error))
            except EarshotError as error:
                failures.append(f"{to_json({'file': file, 'error': str(error)})}\n")
            else:
                lines.append(render(transcript, file, "json"))
                for format in self._output.texts:
                    text = render(transcript, file, format, self._output.cues)
                    store.write(self._output.text(places[file], format), text.encode())
                audio_s += transcript.duration
        if failures:
            store.write(self._output.failed(number), "".join(failures).encode())
        else:
            store.delete(self._output.failed(number))  # from an unfinished attempt
        # This file marks the shard as done, so it is written last.
        store.write(self._output.transcripts(number), _encoded(lines, self._output.format))
        return ShardReport(number, len(lines) + len(failures), audio_s)

    def _transcribe(self, file: str) -> Transcript:
        """Transcribe one file; wait while the transcriber is full."""
        audio = store.read(file, max_bytes=MAX_AUDIO_MB * MIB)
        if len(audio) > MAX_AUDIO_MB * MIB:
            raise AudioLimitError(
                f"{shown(file)} has more than {MAX_AUDIO_MB} MiB; cut it, compress it, or lower "
                "its sample rate"
            )
        request = dataclasses.replace(self._request, audio=audio)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._transcriber.transcribe(request)
            except OverloadedError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_RETRY_S)


def _encoded(lines: Sequence[str], format: Format) -> bytes:
    """Encode transcripts, one JSON object per line, as the content of a shard's file."""
    if format == "jsonl":
        return "".join(lines).encode()
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines], schema=_schema())
    content = pyarrow.BufferOutputStream()
    parquet.write_table(table, content)
    return bytes(content.getvalue())


def _schema() -> pyarrow.Schema:
    """Return the columns of Parquet, the JSON fields of `render`; all shards have the same."""
    word = "start:f8 end:f8 word:str probability:f8 confidence:f8 low_confidence:bool"
    scores = "avg_logprob:f8 no_speech_prob:f8 temperature:f8 compression_ratio:f8 language:str"
    segment = [
        *_columns("start:f8 end:f8 text:str"),
        ("tokens", pyarrow.list_(pyarrow.int32())),
        *_columns(scores),
        ("words", pyarrow.list_(pyarrow.struct(_columns(word)))),
        ("token_logprobs", pyarrow.list_(pyarrow.struct(_columns("token:str logprob:f8")))),
    ]
    return pyarrow.schema(
        [
            *_columns("file:str text:str language:str duration:f8"),
            ("segments", pyarrow.list_(pyarrow.struct(segment))),
            ("warnings", pyarrow.list_(pyarrow.string())),
        ]
    )


def _columns(specification: str) -> list[tuple[str, pyarrow.DataType]]:
    """Return names and types of columns, given as `name:type` with the types of pyarrow."""
    columns = (column.split(":") for column in specification.split())
    return [(name, pyarrow.type_for_alias(alias)) for name, alias in columns]
