"""Define the messages between the two sides of the sandbox, over SOCK_SEQPACKET sockets.

The client sends a file's limits and three descriptors: the file, a socket for its samples, and a
pipe for the exit status of the file's process. Each message on the socket is a head and its
content. The last one is `MessageType.WHOLE` or an error; if neither arrived, the exit
status tells why.
"""

import dataclasses
import enum
import signal
import struct

from serve.contract.errors import (
    AudioError,
    AudioLimitError,
    ChannelError,
    CutShortError,
    EarshotError,
    OptionError,
    UnavailableError,
)
from serve.speech.meter import AudioLimits, too_slow

MAX_TRACK_BYTES = 64  # maximum bytes of `AudioLimits.track`
LIMITS = struct.Struct(f"=ddd?i{MAX_TRACK_BYTES}s")  # the fields of `AudioLimits`
HEAD = struct.Struct("=IQ")  # a `MessageType`, and the peak bytes of memory used by the file so far
STATUS = struct.Struct("=i")  # -n is signal n
BLOCK_SAMPLES = 1 << 15  # maximum float32 samples per message: 2 s; a socket holds two messages

# Address space that decoding a file may add to the file's own size. An hour of MP4 has an index of
# 10 MB, a cover image a few MB; the libraries are loaded before.
MEMORY_BYTES = 128 << 20


class MessageType(enum.IntEnum):
    """The kind of a message from the sandbox."""

    SAMPLES = 0  # float32 follows
    WHOLE = 1  # the end
    AUDIO_ERROR = 2  # its text follows
    AUDIO_LIMIT_ERROR = 3  # the same
    NO_MEMORY = 4
    WARNING = 5  # its text follows
    CHANNEL_ERROR = 6  # the same
    COLUMNS = 7  # float32 of shape (n, COLUMNS) follows
    OPTION_ERROR = 8  # its text follows
    CUT_SHORT_ERROR = 9  # the same


ERRORS: dict[MessageType, type[EarshotError]] = {
    MessageType.AUDIO_LIMIT_ERROR: AudioLimitError,
    MessageType.CHANNEL_ERROR: ChannelError,
    MessageType.CUT_SHORT_ERROR: CutShortError,
    MessageType.AUDIO_ERROR: AudioError,
    MessageType.OPTION_ERROR: OptionError,
}


def pack_limits(limits: AudioLimits) -> bytes:
    """Serialize a file's limits."""
    *numbers, track = dataclasses.astuple(limits)
    return LIMITS.pack(*numbers, track.encode()[:MAX_TRACK_BYTES])


def unpack_limits(message: bytes) -> AudioLimits:
    """Parse a message of `pack_limits`."""
    max_s, max_values, max_cpu_s, partial, channel, track = LIMITS.unpack(message)
    track = track.rstrip(b"\0").decode(errors="replace")
    return AudioLimits(max_s, max_values, max_cpu_s, partial, channel, track)


def no_memory(size: int) -> AudioError:
    """Return the error of a file of `size` bytes that exceeds the memory limit in decoding."""
    return AudioError(
        f"decoding the audio file of {size} bytes needs more than the "
        f"{(size + MEMORY_BYTES) >> 20} MiB allowed; the file is damaged or malicious"
    )


def died(status: int | None, limits: AudioLimits) -> EarshotError:
    """Return the error for a file if its process ended early.

    Args:
        status: the exit status of the process; None if the server has ended, too.
        limits: the file's limits.
    """
    if status == -signal.SIGXCPU:
        return too_slow(limits)
    if status is None:
        return UnavailableError(
            "the server of the decoders' processes has ended; the log has the reason: try again, "
            "or send 16-bit WAV, which needs no such process"
        )
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        return UnavailableError("the audio's decoder process was killed; try again")
    if status < 0:
        return AudioError(
            f"audio crashes its decoder ({signal.Signals(-status).name}); the file is damaged or "
            "malicious"
        )
    return EarshotError(f"the audio's decoder ended with status {status}; see the server's log")
