"""Convert requests and transcripts to KServe v2 tensors and back.

`INPUTS`, derived from a request's options, and `OUTPUTS` define the tensors. The model's
config.pbtxt is rendered from them, and `python -m serve tensors` prints them. The model and the
client both use this module, so they cannot disagree.

`whisper` answers once with all outputs. `whisper_stream` sends one message per segment, with only
the segment's TEXT and SEGMENTS, and then the complete answer. Only the gateway has these two names:
Triton has one model, which sends segments if a parameter asks for them.

An error's text is its class name in `serve.contract.errors`, a colon and its message.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from serve.contract import errors
from serve.contract.codec import from_json, to_json
from serve.contract.config import OPTIONS
from serve.contract.errors import AudioError, EarshotError, OptionError, UnavailableError
from serve.contract.messages import AudioFile, Phase, Request, Segment, Timings, Transcript
from serve.contract.options import Option, checked

Tensor = npt.NDArray[Any]
T = TypeVar("T")

_MAX_ERROR_CHARS = 2000
_OTHER_VERSION = "expected a server of this Earshot version"

MODEL = "whisper"
STREAM_MODEL = "whisper_stream"
KEY_PARAMETER = "earshot_key"
"""The request parameter with its key for cancelling; see `serve.triton.cancellation`."""
CANCEL_PARAMETER = "earshot_cancel"
"""The request parameter with the key of another request to cancel."""
SEGMENTS_PARAMETER = "earshot_segments"
"""The request parameter that is true for `whisper_stream`."""
PHASES_PARAMETER = "earshot_phases"
"""The request parameter that is true if the answer should have PHASES, for traces."""

PRIORITY_PARAMETER = "earshot_priority"
"""The request parameter with a priority other than a file's; clients cannot set it."""


def require_numpy_1() -> None:
    """Reject a numpy version that Triton's Python backend was not compiled for.

    Raises:
        UnavailableError: the version is 2 or later.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        raise UnavailableError(
            f"numpy {np.__version__} is installed; expected numpy 1, for which Triton Inference "
            "Server's Python backend was compiled; numpy 2 would corrupt tensors; install numpy<2"
        )


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of the models."""

    name: str
    datatype: str  # KServe v2's name; BYTES is UTF-8 text unless the description says otherwise
    dims: tuple[int, ...]  # -1: any number
    meaning: str
    max_bytes: int | None = None  # of an input; None: limited by the request only


def _input(option: Option) -> TensorSpec:
    datatype = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES"}[option.kind]
    if datatype == "FP32" and option.many:  # times in long audio
        datatype = "FP64"
    dims = (-1 if option.many else 1,)
    return TensorSpec(option.name.upper(), datatype, dims, option.meaning, option.max_bytes)


# An input of Triton has one datatype. Audio therefore has two inputs, and a request sends one of
# them. All other inputs are optional.
_INPUTS = (
    TensorSpec("AUDIO", "BYTES", (1,), "a whole file in any supported format"),
    TensorSpec("SAMPLES", "FP32", (-1,), "instead of AUDIO: mono samples in [-1, 1]"),
    *map(_input, OPTIONS.values()),
    TensorSpec("STREAM", "BOOL", (1,), "whisper_stream: a message per segment; default: true"),
)
_OUTPUTS = (
    TensorSpec("TEXT", "BYTES", (1,), "the whole text, or the text of one segment"),
    TensorSpec("SEGMENTS", "BYTES", (1,), "JSON list; fields of serve.contract.messages.Segment"),
    TensorSpec("LANGUAGE", "BYTES", (1,), "code; absent without speech and a requested language"),
    TensorSpec("LANGUAGE_PROB", "FP32", (1,), "absent if the request has a language"),
    TensorSpec("DURATION", "FP64", (1,), "seconds of audio; up to the last of CLIP_TIMESTAMPS"),
    TensorSpec(
        "TIMINGS", "BYTES", (1,), "JSON object; fields of serve.contract.messages.Timings, seconds"
    ),
    TensorSpec("TOKENS", "INT32", (-1,), "tokens of the first window, with timestamps"),
    TensorSpec("WARNINGS", "BYTES", (-1,), "sentences about skipped or guessed parts, if any"),
    TensorSpec("PHASES", "BYTES", (1,), "JSON list; absent if the request is not traced"),
)
INPUTS = {spec.name: spec for spec in _INPUTS}
OUTPUTS = {spec.name: spec for spec in _OUTPUTS}
NUMPY_TYPES = {
    "BYTES": np.object_,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT32": np.int32,
    "BOOL": np.bool_,
}


def describe() -> str:
    """Describe the tensors, one per line, inputs first."""
    lines = []
    for title, specs in (("Inputs", INPUTS), ("Outputs", OUTPUTS)):
        lines.append(f"{title}:")
        for spec in specs.values():
            dims = str(list(spec.dims))
            limit = f"; at most {spec.max_bytes} bytes" if spec.max_bytes else ""
            lines.append(f"  {spec.name:<20} {spec.datatype:<6} {dims:<5} {spec.meaning}{limit}")
    return "\n".join(lines) + "\n"


def request_to_inputs(request: Request) -> dict[str, Tensor]:
    """Convert a request to tensors; options with their default values are omitted.

    Raises:
        OptionError: a value has the wrong type or is too large; the server checks everything else.
    """
    values: dict[str, Any] = {
        "AUDIO" if isinstance(request.audio, bytes) else "SAMPLES": request.audio
    }
    for name, option in OPTIONS.items():
        value = getattr(request, name)
        if value != option.default and value is not None:
            values[name.upper()] = checked(option, value)
    inputs = _tensors(INPUTS, values)
    for name, tensor in inputs.items():
        _check_size(name, tensor)
    return inputs


def _check_size(name: str, tensor: Tensor) -> None:
    datatype, limit = INPUTS[name].datatype, INPUTS[name].max_bytes
    if limit is None:
        return
    size = sum(map(len, tensor)) if datatype == "BYTES" else tensor.nbytes
    if size > limit:
        advice = "less text" if datatype == "BYTES" else "fewer numbers"
        raise OptionError(f"{name} has {size} bytes; expected at most {limit}: send {advice}")


def request_from_inputs(inputs: Mapping[str, Tensor], file: AudioFile | None = None) -> Request:
    """Convert tensors to a request; Triton has checked their types and shapes.

    Args:
        inputs: the tensors.
        file: the audio, if it came as an upload instead of a tensor.

    Raises:
        AudioError: there is no audio, or more than one.
        OptionError: a text is too long or not UTF-8.
    """
    if file is None and ("AUDIO" in inputs) == ("SAMPLES" in inputs):
        sources = "both AUDIO and SAMPLES" if "AUDIO" in inputs else "neither AUDIO nor SAMPLES"
        raise AudioError(
            f"found {sources}; expected AUDIO (a file's bytes), or SAMPLES with SAMPLE_RATE"
        )
    options: dict[str, Any] = {}
    for name, tensor in inputs.items():
        if name not in ("AUDIO", "SAMPLES", "STREAM"):
            options[name.lower()] = _option(name, tensor)
    if file is not None:
        return Request(audio=file, **options)
    audio = bytes(inputs["AUDIO"][0]) if "AUDIO" in inputs else inputs["SAMPLES"]
    return Request(audio=audio, **options)


def _option(name: str, tensor: Tensor) -> Any:
    """Return the value of an input."""
    _check_size(name, tensor)
    datatype, many = INPUTS[name].datatype, INPUTS[name].dims == (-1,)
    if datatype == "BYTES":
        return tuple(_text(name, [text]) for text in tensor) if many else _text(name, tensor)
    if many:
        return tuple(tensor.tolist())
    # Convert FP32 through text, so that 0.2 stays 0.2.
    return float(str(tensor[0])) if datatype == "FP32" else tensor[0].item()


def segment_outputs(segment: Segment) -> dict[str, Tensor]:
    """Convert a segment of a stream to tensors."""
    return _tensors(OUTPUTS, {"TEXT": segment.text, "SEGMENTS": to_json((segment,))})


def transcript_outputs(transcript: Transcript, phases: bool = False) -> dict[str, Tensor]:
    """Convert a complete answer to tensors; `phases`: also its PHASES."""
    values = {
        "TEXT": transcript.text,
        "SEGMENTS": to_json(transcript.segments),
        "LANGUAGE": transcript.language,
        "LANGUAGE_PROB": transcript.language_prob,
        "DURATION": transcript.duration,
        "TIMINGS": to_json(transcript.timings),
        "TOKENS": transcript.tokens or None,
        "WARNINGS": transcript.warnings or None,
        "PHASES": to_json(transcript.phases) if phases else None,
    }
    return _tensors(OUTPUTS, values)


def segments_from_outputs(output: Callable[[str], Tensor | None]) -> tuple[Segment, ...]:
    """Return the segments of an answer, or of one message of a stream.

    Raises:
        EarshotError: the segments are missing or malformed.
    """
    return _json(tuple[Segment, ...], "SEGMENTS", output)


def transcript_from_outputs(output: Callable[[str], Tensor | None]) -> Transcript:
    """Read a complete answer; `output` returns an output by name, or None.

    Raises:
        EarshotError: an output is missing or malformed.
    """
    language, prob, tokens = output("LANGUAGE"), output("LANGUAGE_PROB"), output("TOKENS")
    warnings = () if output("WARNINGS") is None else _required("WARNINGS", output)
    return Transcript(
        text=_text("TEXT", _required("TEXT", output)),
        language=None if language is None else _text("LANGUAGE", language),
        language_prob=None if prob is None else float(prob[0]),
        duration=float(_required("DURATION", output)[0]),
        segments=segments_from_outputs(output),
        timings=_json(Timings, "TIMINGS", output),
        tokens=() if tokens is None else tuple(tokens.tolist()),
        warnings=tuple(_text("WARNINGS", [text]) for text in warnings),
        phases=() if output("PHASES") is None else _json(tuple[Phase, ...], "PHASES", output),
    )


def is_whole(output: Callable[[str], Tensor | None]) -> bool:
    """Return whether a stream's message is the complete answer and not a segment."""
    return output("TIMINGS") is not None


def error_to_text(error: EarshotError) -> str:
    """Format an error for the wire, with a limited length."""
    text = f"{type(error).__name__}: {error}"
    if len(text) <= _MAX_ERROR_CHARS:
        return text
    half = _MAX_ERROR_CHARS // 2
    return f"{text[:half]} … {text[-half:]}"


def error_from_text(text: str, status: str) -> EarshotError:
    """Return the error in a server's answer.

    Args:
        text: a text of `error_to_text`, or Triton's own message.
        status: the name of the gRPC status, used if the text names no class.
    """
    name, _, message = text.partition(": ")
    error_class = vars(errors).get(name)
    if isinstance(error_class, type) and issubclass(error_class, EarshotError):
        return error_class(message)
    return errors.FROM_GRPC.get(status, EarshotError)(text)


def _tensors(specs: Mapping[str, TensorSpec], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values that are not None; a scalar becomes a tensor of shape [1]."""
    tensors = {}
    for name, value in values.items():
        if value is not None:
            data = value.encode() if isinstance(value, str) else value
            if isinstance(value, list | tuple) and specs[name].datatype == "BYTES":
                data = [text.encode() for text in value]
            array = np.asarray(data, NUMPY_TYPES[specs[name].datatype])
            tensors[name] = np.ascontiguousarray(np.atleast_1d(array))
    return tensors


def _required(name: str, output: Callable[[str], Tensor | None]) -> Tensor:
    tensor = output(name)
    if tensor is None:
        raise EarshotError(f"the answer lacks {name}; {_OTHER_VERSION}")
    return tensor


def _json(kind: type[T], name: str, output: Callable[[str], Tensor | None]) -> T:
    """Parse the JSON of an output."""
    text = bytes(_required(name, output)[0])
    return from_json(kind, text, f"the answer's {name}", error=EarshotError, advice=_OTHER_VERSION)


def _text(name: str, tensor: Sequence[bytes] | Tensor) -> str:
    try:
        return bytes(tensor[0]).decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{name} is not UTF-8: {error}; expected text in UTF-8") from error
