"""Check a request's audio: its size, its track and the requested stretches."""

import math
import re
from collections.abc import Sequence

import numpy as np

from serve.contract.errors import AudioError, AudioLimitError, OptionError, shown
from serve.contract.messages import AudioFile, Request
from serve.speech.windows import Stretch

MIB = 1 << 20
MAX_AUDIO_MB = 768  # maximum MiB of a file or of samples, as sent
MAX_TIMES = 2048
_TRACK = re.compile(r"[1-9][0-9]{0,3}|[^\W\d][\w -]{0,30}", re.ASCII)


def audio_bytes(request: Request) -> int:
    """Count the bytes of a request's audio as sent."""
    if isinstance(request.audio, bytes | AudioFile):
        return len(request.audio)
    return request.audio.nbytes


def memory_bytes(request: Request) -> int:
    """Count the bytes of memory that a request's audio occupies until it is decoded."""
    return 0 if isinstance(request.audio, AudioFile) else audio_bytes(request)


def check_audio(request: Request) -> None:
    """Check the type and size of a request's audio before it is decoded.

    Raises:
        OptionError: samples have no sample rate, or a file has one.
        AudioError: the audio is neither bytes nor an array.
        AudioLimitError: the audio is larger than `MAX_AUDIO_MB`.
    """
    if isinstance(request.audio, bytes | AudioFile):
        if request.sample_rate is not None:
            raise OptionError(
                f"sample_rate = {request.sample_rate} is only for raw samples, but an audio file "
                "came; leave it out, or send samples"
            )
    elif not isinstance(request.audio, np.ndarray):
        kind = type(request.audio).__name__
        raise AudioError(f"audio is {kind}; expected a file's bytes or an array of samples")
    elif request.sample_rate is None:
        raise OptionError("sample_rate is missing; expected the samples' rate in Hz")
    if audio_bytes(request) > MAX_AUDIO_MB * MIB:
        raise AudioLimitError(
            f"audio has {audio_bytes(request) / MIB:.1f} MiB; expected at most {MAX_AUDIO_MB}: "
            "send it in parts, compressed or at a lower sample rate"
        )


def audio_track_of(request: Request) -> str:
    """Return the number or language of the audio track that a request names, or "".

    Raises:
        OptionError: it is neither a number nor a language, or raw samples came with it.
    """
    track = request.audio_track
    if track is None or track == "":
        return ""
    if not isinstance(track, str) or not _TRACK.fullmatch(track.strip()):
        raise OptionError(
            f"audio_track = {shown(track)}; expected a track number from 1 on, or a language "
            "such as es, spa or Spanish"
        )
    if not isinstance(request.audio, bytes | AudioFile):
        raise OptionError(
            f"audio_track = {shown(track)}, but raw samples have no tracks; leave it out, or send "
            "a file"
        )
    return track.strip()


def stretches_of(name: str, times: Sequence[float]) -> tuple[Stretch, ...]:
    """Read the stretches of audio that an option names.

    Args:
        name: the option's name.
        times: start, end, start, … in seconds; a missing last end means the end of the audio.

    Raises:
        OptionError: the times are not increasing numbers, or are too many.
    """
    if not isinstance(times, tuple | list) or not all(map(is_number, times)):
        raise OptionError(f"{name} = {shown(times)}; expected a list of seconds")
    if len(times) > MAX_TIMES:
        raise OptionError(
            f"{name} has {len(times)} numbers; expected at most {MAX_TIMES}: send the audio in "
            "parts"
        )
    ends = [*times[1::2], math.inf]  # one too many if the last end is given
    stretches = tuple((float(s), float(e)) for s, e in zip(times[::2], ends, strict=False))
    until_s = 0.0
    for start_s, end_s in stretches:
        if not until_s <= start_s < end_s:  # also false for NaN
            raise OptionError(
                f"{name} has {start_s:g} to {end_s:g} s after {until_s:g} s; expected "
                "start, end, start, end, … in seconds, each end after its start and each start "
                "no earlier than the end before it"
            )
        until_s = end_s
    return stretches


def is_number(value: object) -> bool:
    """Return whether a value from a client is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
