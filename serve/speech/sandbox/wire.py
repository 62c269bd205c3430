"""Messages between the two sides of the sandbox, over pairs of sockets that keep them whole.

To the server: a file's limits, with three descriptors beside them: the file, a socket for its
samples, and a pipe for the status with which its process ends. From the socket come a head and what
it announces, until `Kind.WHOLE` or an error; the status counts where neither came.
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
from serve.speech.meter import Limits, too_slow

MAX_TRACK_BYTES = 64  # of `Limits.track`
LIMITS = struct.Struct(f"=ddd?i{MAX_TRACK_BYTES}s")  # the fields of `Limits`
HEAD = struct.Struct("=IQ")  # a `Kind`, and the bytes of memory that the file has taken so far
STATUS = struct.Struct("=i")  # -n is signal n
BLOCK_SAMPLES = 1 << 15  # float32 samples of a message, at most: 2 s; a socket holds two of them

# What a file may take beside as much as it is long itself, in address space. An hour of MP4 has an
# index of 10 MB, a cover is a few MB; the libraries are there already.
MEMORY_BYTES = 128 << 20


class Kind(enum.IntEnum):
    """The kind of a message from the sandbox."""

    SAMPLES = 0  # float32 follows
    WHOLE = 1  # there are no more
    AUDIO_ERROR = 2  # its text follows
    AUDIO_LIMIT_ERROR = 3  # the same
    NO_MEMORY = 4
    WARNING = 5  # its text follows
    CHANNEL_ERROR = 6  # the same
    COLUMNS = 7  # float32 of shape (n, COLUMNS) follows
    OPTION_ERROR = 8  # its text follows
    CUT_SHORT_ERROR = 9  # the same


ERRORS: dict[Kind, type[EarshotError]] = {
    Kind.AUDIO_LIMIT_ERROR: AudioLimitError,
    Kind.CHANNEL_ERROR: ChannelError,
    Kind.CUT_SHORT_ERROR: CutShortError,
    Kind.AUDIO_ERROR: AudioError,
    Kind.OPTION_ERROR: OptionError,
}


def pack_limits(limits: Limits) -> bytes:
    """Return a file's limits as a message."""
    *numbers, track = dataclasses.astuple(limits)
    return LIMITS.pack(*numbers, track.encode()[:MAX_TRACK_BYTES])


def unpack_limits(message: bytes) -> Limits:
    """Return a file's limits from a message."""
    max_s, max_values, max_cpu_s, partial, channel, track = LIMITS.unpack(message)
    track = track.rstrip(b"\0").decode(errors="replace")
    return Limits(max_s, max_values, max_cpu_s, partial, channel, track)


def no_memory(size: int) -> AudioError:
    """Return the error of a file of so many bytes that takes more memory than it may."""
    return AudioError(
        f"audio of {size} bytes needs more memory than such a file should, "
        f"{(size + MEMORY_BYTES) >> 20} MiB; it is damaged, or made to harm"
    )


def died(status: int | None, limits: Limits) -> EarshotError:
    """Return the error of a file whose process ended before it did; None: its server did, too."""
    if status == -signal.SIGXCPU:
        return too_slow(limits)
    if status is None:
        return UnavailableError(
            "the process that starts those which decode audio has ended; the log says why; "
            "try again, or send 16-bit WAV, which needs none"
        )
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        return UnavailableError("the process that decoded the audio was ended; try again")
    if status < 0:
        return AudioError(
            f"audio makes its decoder crash ({signal.Signals(-status).name}); the file is damaged, "
            "or made to harm"
        )
    return EarshotError(f"the audio's decoder ended with status {status}; the log says why")
