"""Every error that Earshot raises on purpose.

    EarshotError
    ├── ConfigError            a TOML file or a flag is wrong
    │   └── FileError          a file that one of them names cannot be read or written
    ├── CheckpointError        a checkpoint cannot be opened or is not Whisper
    │   └── MissingCheckpointError  no place that was tried has it, or gives it now
    ├── EngineError            an engine folder is missing, damaged or of another format
    ├── UnavailableError       this machine lacks what the chosen runtime or server needs
    ├── RequestError           the client's fault; the message names the input
    │   ├── AudioError         audio that cannot be decoded
    │   │   ├── AudioLimitError    audio that is right, and more than the server takes
    │   │   ├── ChannelError       audio without the channel that is asked for
    │   │   └── CutShortError      audio whose end is missing; `partial` transcribes the rest
    │   ├── OptionError        an option that is unknown or that the runtime cannot honour
    │   └── AccessError        no API key, or none that is known
    ├── OverloadedError        the queue is full or the server drains; try again later
    ├── CancelledError         the client cancelled or vanished
    ├── DeadlineError          a bounded wait ran out
    └── DeviceError            the device failed; the runtime cannot go on

Messages say what was found, what was expected and what to do. `status` is how a server answers a
client with the error, at each of its doors; `exit_code` is what a command line ends with. For what
the gateway refuses by itself, `serve.gateway.errors.REASONS` has more of such rows.
"""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

_QUOTA = "insufficient_quota"  # of OpenAI's API, both `code` and `type`
_SHORT = reprlib.Repr()
_SHORT.maxstring = 60
_SHORT.maxother = 200
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """Show a value in an error's message: its repr, without the middle of a long one."""
    return _SHORT.repr(value)


@dataclasses.dataclass(frozen=True)
class ErrorStatus:
    """An error's answer, by the door that its client came through."""

    grpc: str  # status, by its name
    http: int  # status, of OpenAI's API
    code: str | None  # of OpenAI's API
    close: int = 1008  # code of a WebSocket that it closes

    @property
    def kserve(self) -> int:
        """The status of KServe's HTTP, which says what gRPC's says."""
        return self.http if self._is_refused_for_now else _KSERVE[self.grpc]

    @property
    def again(self) -> bool:
        """Tell whether the same request may succeed later."""
        return self.grpc == "UNAVAILABLE" or self._is_refused_for_now

    @property
    def _is_refused_for_now(self) -> bool:
        return self.grpc == "RESOURCE_EXHAUSTED" and self.http == 429

    @property
    def kind(self) -> str:
        """The `type` of an error of OpenAI's API."""
        if self.code == _QUOTA:
            return _QUOTA
        if self.http == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.http < 500 else "server_error"


_KSERVE = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 413,
    "UNIMPLEMENTED": 404,
    "CANCELLED": 499,
    "DEADLINE_EXCEEDED": 504,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
}


class EarshotError(Exception):
    """Base of every expected error."""

    status: ClassVar[ErrorStatus] = ErrorStatus("INTERNAL", 500, "server_error", close=1011)
    exit_code: ClassVar[int] = 1


class ConfigError(EarshotError):
    """A configuration file or flag is wrong."""

    exit_code = 2


class FileError(ConfigError):
    """A file that a flag, a config or a manifest names cannot be read or written."""


class CheckpointError(EarshotError):
    """A checkpoint cannot be opened, or is not a Whisper checkpoint."""


class MissingCheckpointError(CheckpointError):
    """A checkpoint cannot be had; the message says why, of each place that was tried."""

    exit_code = 3


class EngineError(EarshotError):
    """An engine folder is missing, damaged, or of another format."""

    status = ErrorStatus("UNAVAILABLE", 503, "server_unavailable")


class UnavailableError(EarshotError):
    """This machine lacks something that the chosen runtime or server needs."""

    status = ErrorStatus("UNAVAILABLE", 503, "server_unavailable")


class RequestError(EarshotError):
    """The request is wrong; sending it again unchanged cannot help."""

    status = ErrorStatus("INVALID_ARGUMENT", 400, None)


class AudioError(RequestError):
    """The audio cannot be decoded or is out of bounds."""

    status = ErrorStatus("INVALID_ARGUMENT", 400, "invalid_audio")


class AudioLimitError(AudioError):
    """The audio is longer, larger or more work than may be; in parts it may go."""

    status = ErrorStatus("INVALID_ARGUMENT", 422, "audio_limit_exceeded")


class ChannelError(AudioError):
    """The audio lacks a channel that is asked for."""


class CutShortError(AudioError):
    """The end of the audio is missing; the same request with `partial` transcribes the rest."""

    status = ErrorStatus("INVALID_ARGUMENT", 400, "audio_cut_short")


class OptionError(RequestError):
    """An option is unknown, malformed, or cannot be honoured by the running runtime."""

    status = ErrorStatus("INVALID_ARGUMENT", 400, "invalid_value")


class AccessError(RequestError):
    """The request has no API key, or one that is not known."""

    status = ErrorStatus("UNAUTHENTICATED", 401, "invalid_api_key")


class OverloadedError(EarshotError):
    """The queue is full or the server is draining; the same request may succeed later."""

    status = ErrorStatus("UNAVAILABLE", 429, "overloaded")


class CancelledError(EarshotError):
    """The client cancelled the request or went away."""

    status = ErrorStatus("CANCELLED", 499, "client_gone")


class DeadlineError(EarshotError):
    """A bounded wait ran out before an answer was ready."""

    status = ErrorStatus("UNAVAILABLE", 503, "timeout")


class DeviceError(EarshotError):
    """The device failed; the runtime cannot go on and must be restarted."""


FROM_GRPC: Mapping[str, type[EarshotError]] = {
    "INVALID_ARGUMENT": RequestError,
    "CANCELLED": CancelledError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "NOT_FOUND": UnavailableError,
    "UNAVAILABLE": UnavailableError,
}
"""Classes by the gRPC status of a text that names none; where it is not here, an EarshotError."""


def from_http(status: int) -> type[EarshotError]:
    """Find the class of error that a status of OpenAI's API means, of whichever server."""
    if status in (429, 503):
        return OverloadedError
    if status == 401:
        return AccessError
    return RequestError if status < 500 else EarshotError
