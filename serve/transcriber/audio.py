"""A request's audio: how large it is, and which stretches of it are wanted."""

import math
import re
from collections.abc import Sequence

import numpy as np

from serve.contract.errors import AudioError, AudioLimitError, OptionError, shown
from serve.contract.messages import AudioFile, Request
from serve.speech.stretches import Stretch

MIB = 1 << 20
MAX_AUDIO_MB = 768  # MiB of a file, or of samples, as sent
MAX_TIMES = 2048
_TRACK = re.compile(r"[1-9][0-9]{0,3}|[^\W\d][\w -]{0,30}", re.ASCII)


def audio_bytes(request: Request) -> int:
    """Count the bytes of a request's audio as sent."""
    if isinstance(request.audio, bytes | AudioFile):
        return len(request.audio)
    return request.audio.nbytes


def memory_bytes(request: Request) -> int:
    """Count the bytes of memory that a request's audio takes until it is decoded."""
    return 0 if isinstance(request.audio, AudioFile) else audio_bytes(request)


def check_audio(request: Request) -> None:
    """Refuse audio that is none, or too large; it is decoded later.

    Raises:
        OptionError: a sample rate is missing, or is there and must not be.
        AudioError: the audio is neither bytes nor an array, or too large.
    """
    if isinstance(request.audio, bytes | AudioFile):
        if request.sample_rate is not None:
            raise OptionError(
                f"sample_rate = {request.sample_rate} came with a file's bytes, which state "
                "their own; leave it out, or send samples"
            )
    elif not isinstance(request.audio, np.ndarray):
        kind = type(request.audio).__name__
        raise AudioError(f"audio is {kind}; expected a file's bytes or an array of samples")
    elif request.sample_rate is None:
        raise OptionError("samples came without sample_rate; expected it in Hz")
    if audio_bytes(request) > MAX_AUDIO_MB * MIB:
        raise AudioLimitError(
            f"audio has {audio_bytes(request) / MIB:.1f} MiB; expected at most {MAX_AUDIO_MB}: "
            "send it in parts, compressed or at a lower rate"
        )


def audio_track_of(request: Request) -> str:
    """Return the number or language of the track that a request names; empty: none.

    Raises:
        OptionError: it can be neither, or samples came, which have no tracks.
    """
    track = request.audio_track
    if track is None or track == "":
        return ""
    if not isinstance(track, str) or not _TRACK.fullmatch(track.strip()):
        raise OptionError(
            f"audio_track = {shown(track)}; expected the number of a track, from 1 on, or a "
            "language such as es, spa or Spanish"
        )
    if not isinstance(request.audio, bytes | AudioFile):
        raise OptionError(
            f"audio_track = {shown(track)} came with samples, which have no tracks; leave it out, "
            "or send a file"
        )
    return track.strip()


def stretches_of(name: str, times: Sequence[float]) -> tuple[Stretch, ...]:
    """Read the stretches of audio that an option names.

    Args:
        name: of the option.
        times: start, end, start, …; the last end may be missing, for the end of the audio.

    Raises:
        OptionError: they are no times that follow each other.
    """
    if not isinstance(times, tuple | list) or not all(map(is_number, times)):
        raise OptionError(f"{name} = {shown(times)}; expected a list of seconds")
    if len(times) > MAX_TIMES:
        raise OptionError(
            f"{name} has {len(times)} numbers; expected at most {MAX_TIMES}: send the audio in "
            "parts"
        )
    ends = [*times[1::2], math.inf]  # of which the last may be one too many
    stretches = tuple((float(s), float(e)) for s, e in zip(times[::2], ends, strict=False))
    until_s = 0.0
    for start_s, end_s in stretches:
        if not until_s <= start_s < end_s:  # nor is NaN between them
            raise OptionError(
                f"{name} has {start_s:g} to {end_s:g} s after {until_s:g} s; expected "
                "start, end, start, end, … in seconds, each end after its start and each start "
                "no earlier than the end before it"
            )
        until_s = end_s
    return stretches


def is_number(value: object) -> bool:
    """Tell whether a value from outside is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
