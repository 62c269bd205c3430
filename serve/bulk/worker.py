"""The actor: it holds an engine, and makes a file of transcripts of a shard."""

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow
from pyarrow import parquet

from serve.bulk import store
from serve.bulk.sharding import BulkOutput, Format, Shard
from serve.contract.codec import to_json
from serve.contract.config import Config
from serve.contract.errors import (
    AudioError,
    AudioLimitError,
    CancelledError,
    DeviceError,
    EarshotError,
    OptionError,
    OverloadedError,
    shown,
)
from serve.contract.flags import in_flags, told
from serve.contract.messages import Request, Transcript
from serve.speech.formats import render
from serve.transcriber.audio import MAX_AUDIO_MB, MIB
from serve.transcriber.open import open_transcriber

Answer = tuple[str, Callable[[], Transcript]]
"""A file, and what gives or raises what became of it."""

_MOST_ENDS = 2  # of a process while it transcribed a file alone, which may have another reason once
_RETRY_S = 0.1  # between two tries of a request for which there is no room yet

_WORD = {
    "start": "f8",
    "end": "f8",
    "word": "str",
    "probability": "f8",
    "confidence": "f8",
    "low_confidence": "bool",
}
_SEGMENT = {"start": "f8", "end": "f8", "text": "str"}
_SCORES = {
    "avg_logprob": "f8",
    "no_speech_prob": "f8",
    "temperature": "f8",
    "compression_ratio": "f8",
    "language": "str",
}


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """The outcome of a shard."""

    number: int
    files: int = 0  # transcribed or set aside
    failed: int = 0  # of these
    audio_s: float = 0.0  # transcribed
    seconds: float = 0.0  # that it took
    undone: str = ""  # why it has to be done again, by another process
    refused: str = ""  # why no shard can be done, by anybody


class ShardWorker:
    """Transcribes shards, two at a time, so that the engine is busy while one of them ends.

    Args:
        config: which engine runs, and how.
        request: what is asked of each file; its audio is replaced.
        output: where transcripts go.
    """

    def __init__(self, config: Config, request: Request, output: BulkOutput) -> None:
        self._request, self._output = request, output
        self._patience_s = config.transcriber.request_timeout_s
        self._pool = ThreadPoolExecutor(config.runtime.slots)
        self._device_failed = False
        self._refused = ""
        try:
            self._transcriber = open_transcriber(config)
        except EarshotError as error:
            # Told by each shard: what an actor's start raises is a stack trace to the caller.
            self._refused = f"{error} (on {os.uname().nodename})"

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Do a shard, unless it is done: a row of a `Shard` in, one of a `Report` out.

        With `alone` its files are done one by one, so that one that ends its process is found.
        """
        shard = Shard(int(row["number"]), tuple(row["files"]), tuple(row["places"]))
        return dataclasses.asdict(self._report(shard, row["alone"]))

    def _report(self, shard: Shard, alone: bool) -> ShardReport:
        number, files = shard.number, shard.files
        if self._refused:
            return ShardReport(number, refused=self._refused)
        if self._device_failed:
            os._exit(1)  # only a new process has a device that works
        try:
            if store.exists(self._output.transcripts(number)):
                return ShardReport(number, len(files))
            answers = self._one_by_one(number, files) if alone else self._together(files)
            with contextlib.closing(answers):
                return self._do(shard, answers)
        except EarshotError as error:  # of the output, or of what is asked
            return ShardReport(number, refused=told(error))

    def _do(self, shard: Shard, answers: Iterable[Answer]) -> ShardReport:
        began, number = time.monotonic(), shard.number
        places = dict(zip(shard.files, shard.places, strict=False))  # some runs have none
        lines: list[str] = []
        failed: list[dict[str, str]] = []
        audio_s = 0.0
        for file, answer in answers:
            try:
                transcript = answer()
            except OptionError:
                raise
            except (DeviceError, CancelledError) as error:
                self._device_failed = True
                return ShardReport(number, undone=str(error))
            except EarshotError as error:
                failed.append({"file": file, "error": told(error)})
            else:
                warnings = tuple(map(in_flags, transcript.warnings))
                transcript = dataclasses.replace(transcript, warnings=warnings)
                lines.append(render(transcript, file, "json"))
                for format in self._output.texts:
                    text = render(transcript, file, format, self._output.cues)
                    store.write(self._output.text(places[file], format), text.encode())
                audio_s += transcript.duration
        self._write(number, lines, failed)
        count = len(lines) + len(failed)
        return ShardReport(number, count, len(failed), audio_s, time.monotonic() - began)

    def _together(self, files: Sequence[str]) -> Generator[Answer, None, None]:
        """Transcribe all files at once, as fast as the engine takes them."""
        answers = [self._pool.submit(self._transcribe, file) for file in files]
        try:
            for file, answer in zip(files, answers, strict=True):
                yield file, answer.result
        finally:
            for answer in answers:  # what is not begun where the shard is given up
                answer.cancel()

    def _one_by_one(self, number: int, files: Sequence[str]) -> Generator[Answer, None, None]:
        """Transcribe file by file; one that was in hand too often as a process ended fails."""
        tries = self._output.tries(number)
        for file in files:
            if tries.get(file, 0) < _MOST_ENDS:
                self._output.keep_tries(number, {**tries, file: tries.get(file, 0) + 1})
                yield file, functools.partial(self._transcribe, file)
            else:
                yield file, functools.partial(_refuse, file)

    def _transcribe(self, file: str) -> Transcript:
        """Transcribe one file; wait while others take up the room for audio."""
        audio = store.read(file, most_bytes=MAX_AUDIO_MB * MIB)
        if len(audio) > MAX_AUDIO_MB * MIB:
            raise AudioLimitError(
                f"{shown(file)} has more than {MAX_AUDIO_MB} MiB; cut it, compress it, or lower "
                "its rate"
            )
        request = dataclasses.replace(self._request, audio=audio)
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._transcriber.transcribe(request)
            except OverloadedError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_RETRY_S)

    def _write(self, number: int, lines: list[str], failed: list[dict[str, str]]) -> None:
        """Write what failed, then the transcripts, which say that the shard is done."""
        name = self._output.failed(number)
        if failed:
            store.write(name, "".join(f"{to_json(failure)}\n" for failure in failed).encode())
        else:
            store.delete(name)  # of a try that was not finished
        self._output.keep_tries(number, {})
        store.write(self._output.transcripts(number), _encoded(lines, self._output.format))


def _refuse(file: str) -> Transcript:
    raise AudioError(
        f"{shown(file)} ended the process that transcribed it {_MOST_ENDS} times, as for want of "
        "memory; expected audio that fits beside the engine"
    )


def _encoded(lines: Sequence[str], format: Format) -> bytes:
    """Make a file's content of transcripts, each a line of JSON."""
    if format == "jsonl":
        return "".join(lines).encode()
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines], schema=_schema())
    content = pyarrow.BufferOutputStream()
    parquet.write_table(table, content)
    return bytes(content.getvalue())


def _schema() -> pyarrow.Schema:
    """Return the columns of Parquet, the same in each shard: what `render` gives."""
    segment = {
        **_types(_SEGMENT),
        "tokens": pyarrow.list_(pyarrow.int32()),
        **_types(_SCORES),
        "words": pyarrow.list_(_struct(_types(_WORD))),
        "token_logprobs": pyarrow.list_(_struct(_types({"token": "str", "logprob": "f8"}))),
    }
    texts = _types({"file": "str", "text": "str", "language": "str", "duration": "f8"})
    segments = pyarrow.list_(_struct(segment))
    return pyarrow.schema(
        {**texts, "segments": segments, "warnings": pyarrow.list_(pyarrow.string())}
    )


def _types(names: dict[str, str]) -> dict[str, pyarrow.DataType]:
    return {name: pyarrow.type_for_alias(alias) for name, alias in names.items()}


def _struct(fields: dict[str, pyarrow.DataType]) -> pyarrow.DataType:
    return pyarrow.struct(list(fields.items()))
