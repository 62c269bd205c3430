"""Check a request's diarization options: speakers per channel, or by voice."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import get_args

from serve.contract.errors import OptionError, shown
from serve.contract.messages import AudioFile, Channels, Request

MOST_SPEAKERS = 100
MOST_KNOWN = 16
_COUNTS = ("num_speakers", "min_speakers", "max_speakers")
_TOLD = "diarize = true"


@dataclasses.dataclass(frozen=True)
class Speakers:
    """The facts that a client states about a recording's speakers."""

    num: int | None = None  # the exact number of speakers
    least: int | None = None
    most: int | None = None
    known: tuple[tuple[str, bytes], ...] = ()  # name and reference audio file of each

    @property
    def names(self) -> tuple[str, ...]:
        """The known speakers' names."""
        return tuple(name for name, _ in self.known)


def speakers_of(request: Request) -> Speakers | None:
    """Read the diarization options of a request; None if it does not ask for diarization.

    Raises:
        OptionError: options contradict each other, or a name or a reference is invalid.
    """
    known = _known_speakers(request.known_speaker_names, request.known_speaker_references)
    counts = {name: getattr(request, name) for name in _COUNTS}
    for name, count in counts.items():
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_SPEAKERS):
            raise OptionError(f"{name} = {shown(count)}; expected 1 to {MOST_SPEAKERS}")
        if count is not None and not request.diarize:
            raise OptionError(f"{name} = {count} needs {_TOLD}")
    if not request.diarize:
        if known:
            raise OptionError(f"known_speaker_names needs {_TOLD}")
        return None
    if request.task == "translate":
        raise OptionError(
            "diarize = true, but a translation's words are in another order than the speech; "
            "expected task = transcribe"
        )
    num, least, most = counts.values()
    low, high = num or least or 1, num or most or MOST_SPEAKERS
    if not (least or 1) <= low <= high <= (most or MOST_SPEAKERS):
        given = ", ".join(f"{name} = {count}" for name, count in counts.items() if count)
        raise OptionError(f"{given}; expected min_speakers <= num_speakers <= max_speakers")
    return Speakers(num, least, most, known)


def has_channels(request: Request) -> bool:
    """Return whether a request asks for one speaker per audio channel.

    Raises:
        OptionError: `channels` is unknown, raw samples came, or `diarize` or `voice` is set too.
    """
    if request.channels not in get_args(Channels):
        expected = " or ".join(get_args(Channels))
        raise OptionError(f"channels = {shown(request.channels)}; expected {expected}")
    if request.channels == "mix":
        return False
    if not isinstance(request.audio, bytes | AudioFile):
        raise OptionError("channels = split, but raw samples have one channel; send a file")
    if request.diarize or request.voice:
        other = "diarize" if request.diarize else "voice"
        raise OptionError(f"channels = split came with {other}; expected one of them")
    return True


def _known_speakers(
    names: Sequence[str], references: Sequence[str]
) -> tuple[tuple[str, bytes], ...]:
    """Read the known speakers' names and reference files; these come as data URLs (RFC 2397).

    Raises:
        OptionError: there are too many, the two lists differ in length, names are empty or
            repeated, or a reference is not a data URL.
    """
    if len(names) != len(references) or len(names) > MOST_KNOWN:
        raise OptionError(
            f"known_speaker_names has {len(names)} and known_speaker_references {len(references)}; "
            f"expected the same number of both, at most {MOST_KNOWN}"
        )
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise OptionError(f"known_speaker_names = {shown(list(names))}; expected distinct names")
    return tuple(zip(names, map(_file_of, references), strict=True))


def _file_of(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if head.startswith("data:") and head.endswith(";base64") and comma:
            return base64.b64decode(data, validate=True)
    except ValueError:
        pass  # the error is raised below
    raise OptionError(
        f"known_speaker_references has {shown(url)}; expected data URLs in base64, such as "
        "data:audio/wav;base64,UklGR…"
    )
