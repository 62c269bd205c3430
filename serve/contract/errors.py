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
    │   │   └── ChannelError       audio without the channel that is asked for
    │   ├── OptionError        an option that is unknown or that the runtime cannot honour
    │   └── AccessError        no API key, or none that is known
    ├── OverloadedError        the queue is full or the server drains; try again later
    ├── CancelledError         the client cancelled or vanished
    ├── DeadlineError          a bounded wait ran out
    └── DeviceError            the device failed; the runtime cannot go on

Messages say what was found, what was expected and what to do. `status` is the name of the gRPC
status that a server answers with; `exit_code` is what a command line ends with.
"""

import reprlib
from typing import Any, ClassVar

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60
_SHORT.maxother = 200
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """A value as an error's message shows it: its repr, without the middle of a long one."""
    return _SHORT.repr(value)


class EarshotError(Exception):
    """Base of every expected error."""

    status: ClassVar[str] = "INTERNAL"
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

    status = "UNAVAILABLE"


class UnavailableError(EarshotError):
    """This machine lacks something that the chosen runtime or server needs."""

    status = "UNAVAILABLE"


class RequestError(EarshotError):
    """The request is wrong; sending it again unchanged cannot help."""

    status = "INVALID_ARG"


class AudioError(RequestError):
    """The audio cannot be decoded or is out of bounds."""


class AudioLimitError(AudioError):
    """The audio is longer, larger or more work than may be; in parts it may go."""


class ChannelError(AudioError):
    """The audio lacks a channel that is asked for."""


class OptionError(RequestError):
    """An option is unknown, malformed, or cannot be honoured by the running runtime."""


class AccessError(RequestError):
    """The request has no API key, or one that is not known."""

    status = "UNAUTHENTICATED"


class OverloadedError(EarshotError):
    """The queue is full or the server is draining; the same request may succeed later."""

    status = "UNAVAILABLE"


class CancelledError(EarshotError):
    """The client cancelled the request or went away."""

    status = "CANCELLED"


class DeadlineError(EarshotError):
    """A bounded wait ran out before an answer was ready."""

    status = "UNAVAILABLE"


class DeviceError(EarshotError):
    """The device failed; the runtime cannot go on and must be restarted."""
