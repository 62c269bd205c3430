"""The errors that Earshot raises deliberately.

    EarshotError
    ├── ConfigError            a TOML file or a flag is wrong
    │   └── FileError          a file that one of them names cannot be read or written
    ├── CheckpointError        a checkpoint cannot be opened or is not Whisper
    │   └── MissingCheckpointError  no source has it, or no source is reachable
    ├── EngineError            an engine folder is missing, damaged or of another format
    ├── UnavailableError       this machine lacks what the chosen runtime or server needs
    ├── RequestError           the request is wrong; the message names the input
    │   ├── AudioError         the audio cannot be decoded
    │   │   ├── AudioLimitError    the audio is valid but exceeds a limit
    │   │   ├── ChannelError       the audio lacks the requested channel
    │   │   └── CutShortError      the end of the audio is missing; `partial` accepts it
    │   ├── OptionError        an option is unknown, or the runtime does not support it
    │   └── AccessError        the API key is missing or unknown
    ├── OverloadedError        the queue is full or the server drains; try again later
    ├── CancelledError         the client cancelled the request or disconnected
    ├── DeadlineError          a timeout expired
    └── DeviceError            the device failed; the runtime cannot continue

Messages tell what was found, what was expected and what to do. `status` maps the error to the
status codes of each protocol; `exit_code` is the exit status of a command.
`serve.gateway.errors.REASONS` has the status codes of the gateway's own rejections.
"""

import contextlib
import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

_QUOTA = "insufficient_quota"  # of OpenAI's API, both `code` and `type`
_SHORT = reprlib.Repr()
_SHORT.maxstring = 60
_SHORT.maxother = 200
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """Format a value for an error message: its repr, shortened in the middle."""
    return _SHORT.repr(value)


@dataclasses.dataclass(frozen=True)
class ErrorStatus:
    """The status codes of an error in each protocol."""

    grpc: str  # the name of the gRPC status
    http: int  # the HTTP status of OpenAI's API
    code: str | None  # the `code` of OpenAI's API
    close: int = 1008  # the close code of a WebSocket

    @property
    def kserve(self) -> int:
        """Return the status of KServe's HTTP, which follows the gRPC status."""
        return self.http if self._is_refused_for_now else _KSERVE[self.grpc]

    @property
    def retryable(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.grpc == "UNAVAILABLE" or self._is_refused_for_now

    @property
    def _is_refused_for_now(self) -> bool:
        return self.grpc == "RESOURCE_EXHAUSTED" and self.http == 429

    @property
    def kind(self) -> str:
        """Return the `type` of an error of OpenAI's API."""
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
    """A checkpoint cannot be fetched; the message has the reason of each source."""

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
    """The audio exceeds a limit of length, size or decoding work; smaller parts may not."""

    status = ErrorStatus("INVALID_ARGUMENT", 422, "audio_limit_exceeded")


class ChannelError(AudioError):
    """The audio lacks a requested channel."""


class CutShortError(AudioError):
    """The end of the audio is missing; with `partial`, the rest is transcribed."""

    status = ErrorStatus("INVALID_ARGUMENT", 400, "audio_cut_short")


class OptionError(RequestError):
    """An option is unknown or malformed, or the runtime does not support it."""

    status = ErrorStatus("INVALID_ARGUMENT", 400, "invalid_value")


class AccessError(RequestError):
    """The request has no API key, or an unknown one."""

    status = ErrorStatus("UNAUTHENTICATED", 401, "invalid_api_key")


class OverloadedError(EarshotError):
    """The queue is full or the server is draining; the same request may succeed later."""

    status = ErrorStatus("UNAVAILABLE", 429, "overloaded")


class CancelledError(EarshotError):
    """The client cancelled the request or disconnected."""

    status = ErrorStatus("CANCELLED", 499, "client_gone")


class DeadlineError(EarshotError):
    """A timeout expired before the answer was ready."""

    status = ErrorStatus("UNAVAILABLE", 503, "timeout")


class DeviceError(EarshotError):
    """The device failed; the runtime must be restarted."""


FROM_GRPC: Mapping[str, type[EarshotError]] = {
    "INVALID_ARGUMENT": RequestError,
    "CANCELLED": CancelledError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "NOT_FOUND": UnavailableError,
    "UNAVAILABLE": UnavailableError,
}
"""Error classes by gRPC status, for messages that name no class; the default is EarshotError."""


_FROM_HTTP = {401: AccessError, 429: OverloadedError, 503: OverloadedError}


def from_response(url: str, status: int, body: bytes) -> EarshotError:
    """Make the error of a failed HTTP response; its body may be OpenAI's JSON of an error."""
    kind = _FROM_HTTP.get(status, RequestError if status < 500 else EarshotError)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return kind(json.loads(body)["error"]["message"])
    return EarshotError(f"{url} returned status {status}; expected an Earshot server there")
