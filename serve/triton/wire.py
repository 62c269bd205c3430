"""Transcriptions as KServe v2 tensors: what the Triton models take and give, both ways.

Used by the models and by the client, so that the two cannot disagree. All inputs but the audio
are optional. Triton gives an input one type, so audio has two inputs, of which one is sent:

    AUDIO        BYTES [1]    a whole file in any supported format
    SAMPLES      FP32  [-1]   mono samples in [-1, 1], with
    SAMPLE_RATE  INT32 [1]    Hz
    LANGUAGE     BYTES [1]    code such as "en"; detected where it is not sent
    TASK         BYTES [1]    "transcribe" or "translate"
    PROMPT       BYTES [1]    text that precedes the audio: names, spelling, style
    TIMESTAMPS   BOOL  [1]    whether the model marks times inside its windows; default true
    TEMPERATURE  FP32  [1]    0 to 1; where it is not sent, 0 with the configured fallback
    MAX_TOKENS   INT32 [1]    new tokens per window of at most 30 s
    STREAM       BOOL  [1]    `whisper_stream` alone: whether segments are sent one by one

The answer, of `whisper` and as the last message of `whisper_stream`:

    TEXT           BYTES [1]
    SEGMENTS       BYTES [1]  JSON list of segments; the fields of `serve.messages.Segment`
    LANGUAGE       BYTES [1]  code
    LANGUAGE_PROB  FP32  [1]  left out where the client named the language
    DURATION       FP64  [1]  seconds of audio
    TIMINGS        BYTES [1]  JSON object; the fields of `serve.messages.Timings`, seconds

Each earlier message of `whisper_stream` holds one more segment: TEXT and SEGMENTS alone.

An error's text is the name of its class in `serve.errors`, a colon and its message.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from serve.errors import (
    AudioError,
    CancelledError,
    DeadlineError,
    EarshotError,
    OptionError,
    RequestError,
    UnavailableError,
)
from serve.messages import Request, Segment, Task, Timings, Transcript

Tensor = npt.NDArray[Any]

MODEL = "whisper"
STREAM_MODEL = "whisper_stream"

INPUTS = {
    "AUDIO": "BYTES",
    "SAMPLES": "FP32",
    "SAMPLE_RATE": "INT32",
    "LANGUAGE": "BYTES",
    "TASK": "BYTES",
    "PROMPT": "BYTES",
    "TIMESTAMPS": "BOOL",
    "TEMPERATURE": "FP32",
    "MAX_TOKENS": "INT32",
    "STREAM": "BOOL",
}
OUTPUTS = ("TEXT", "SEGMENTS", "LANGUAGE", "LANGUAGE_PROB", "DURATION", "TIMINGS")
_NUMPY = {"FP32": np.float32, "INT32": np.int32, "BOOL": np.bool_}


def request_to_inputs(request: Request) -> dict[str, Tensor]:
    """The tensors that say the same as `request`; what has its default is left out."""
    values: dict[str, bytes | str | float | None] = {
        "SAMPLE_RATE": request.sample_rate,
        "LANGUAGE": request.language,
        "TASK": None if request.task == "transcribe" else request.task,
        "PROMPT": request.prompt or None,
        "TIMESTAMPS": None if request.timestamps else False,
        "TEMPERATURE": request.temperature,
        "MAX_TOKENS": request.max_tokens,
    }
    inputs: dict[str, Tensor] = {}
    if isinstance(request.audio, bytes):
        values["AUDIO"] = request.audio
    else:
        inputs["SAMPLES"] = np.ascontiguousarray(request.audio, dtype=np.float32)
    for name, value in values.items():
        if value is not None:
            inputs[name] = _tensor(value, INPUTS[name])
    return inputs


def request_from_inputs(inputs: Mapping[str, Tensor]) -> Request:
    """The request that tensors stand for; Triton has checked their types and shapes.

    Raises:
        AudioError: no audio, or two.
        OptionError: text that is not UTF-8, or an unknown task.
    """
    if ("AUDIO" in inputs) == ("SAMPLES" in inputs):
        found = "both AUDIO and SAMPLES" if "AUDIO" in inputs else "neither AUDIO nor SAMPLES"
        raise AudioError(
            f"found {found}; expected AUDIO (a file's bytes), or SAMPLES with SAMPLE_RATE"
        )
    options: dict[str, Any] = {}
    for name in ("SAMPLE_RATE", "TIMESTAMPS", "MAX_TOKENS"):
        if name in inputs:
            options[name.lower()] = inputs[name][0].item()
    if "TEMPERATURE" in inputs:  # by way of text, so that 0.2 in FP32 is 0.2 and nothing beside it
        options["temperature"] = float(str(inputs["TEMPERATURE"][0]))
    for name in ("LANGUAGE", "TASK", "PROMPT"):
        if name in inputs:
            options[name.lower()] = _text(name, inputs[name])
    task = options.get("task", "transcribe")
    if task not in get_args(Task):
        raise OptionError(f"TASK = {task!r}; expected one of {', '.join(get_args(Task))}")
    if "AUDIO" in inputs:
        return Request(audio=bytes(inputs["AUDIO"][0]), **options)
    return Request(audio=inputs["SAMPLES"], **options)


def segment_outputs(segment: Segment) -> dict[str, Tensor]:
    """One more segment of a stream."""
    return {"TEXT": _tensor(segment.text, "BYTES"), "SEGMENTS": _segments([segment])}


def transcript_outputs(transcript: Transcript) -> dict[str, Tensor]:
    """A whole answer."""
    outputs = {
        "TEXT": _tensor(transcript.text, "BYTES"),
        "SEGMENTS": _segments(transcript.segments),
        "LANGUAGE": _tensor(transcript.language, "BYTES"),
        "DURATION": np.array([transcript.duration], np.float64),
        "TIMINGS": _tensor(json.dumps(vars(transcript.timings)), "BYTES"),
    }
    if transcript.language_prob is not None:
        outputs["LANGUAGE_PROB"] = _tensor(transcript.language_prob, "FP32")
    return outputs


def segments_from_outputs(output: Callable[[str], Tensor | None]) -> tuple[Segment, ...]:
    """The segments in an answer, or in one message of a stream."""
    return tuple(
        Segment(**{**fields, "tokens": tuple(fields["tokens"])})
        for fields in json.loads(_text("SEGMENTS", _present("SEGMENTS", output)))
    )


def transcript_from_outputs(output: Callable[[str], Tensor | None]) -> Transcript:
    """A whole answer; `output` gives an output by name, or None.

    Raises:
        EarshotError: an output is missing.
    """
    prob = output("LANGUAGE_PROB")
    return Transcript(
        text=_text("TEXT", _present("TEXT", output)),
        language=_text("LANGUAGE", _present("LANGUAGE", output)),
        language_prob=None if prob is None else float(prob[0]),
        duration=float(_present("DURATION", output)[0]),
        segments=segments_from_outputs(output),
        timings=Timings(**json.loads(_text("TIMINGS", _present("TIMINGS", output)))),
    )


def is_whole(output: Callable[[str], Tensor | None]) -> bool:
    """Whether a stream's message is its answer, rather than one more segment."""
    return output("TIMINGS") is not None


def error_to_text(error: EarshotError) -> str:
    """What an error says on the wire."""
    return f"{type(error).__name__}: {error}"


def error_from_text(text: str, status: str) -> EarshotError:
    """The error that a server answered with.

    Args:
        text: from `error_to_text`, or Triton's own words.
        status: name of the gRPC status, which decides where the text names no class.
    """
    name, _, message = text.partition(": ")
    by_name = {kind.__name__: kind for kind in _kinds(EarshotError)}
    if name in by_name:
        return by_name[name](message)
    by_status: dict[str, type[EarshotError]] = {
        "INVALID_ARGUMENT": RequestError,
        "CANCELLED": CancelledError,
        "DEADLINE_EXCEEDED": DeadlineError,
        "NOT_FOUND": UnavailableError,
        "UNAVAILABLE": UnavailableError,
    }
    return by_status.get(status, EarshotError)(text)


def _kinds(kind: type[EarshotError]) -> Iterator[type[EarshotError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _tensor(value: bytes | str | float, datatype: str) -> Tensor:
    """A tensor of shape [1]."""
    if datatype != "BYTES":
        return np.array([value], _NUMPY[datatype])
    data = value if isinstance(value, bytes) else cast(str, value).encode()
    return np.array([data], dtype=np.object_)


def _segments(segments: list[Segment] | tuple[Segment, ...]) -> Tensor:
    # Not `dataclasses.asdict`, which copies each token by itself.
    text = json.dumps([vars(segment) for segment in segments], ensure_ascii=False)
    return _tensor(text, "BYTES")


def _present(name: str, output: Callable[[str], Tensor | None]) -> Tensor:
    tensor = output(name)
    if tensor is None:
        raise EarshotError(f"the answer holds no {name}; is the server an Earshot of this version?")
    return tensor


def _text(name: str, tensor: Tensor) -> str:
    try:
        return bytes(tensor[0]).decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{name} is not UTF-8: {error}; expected text in UTF-8") from error
