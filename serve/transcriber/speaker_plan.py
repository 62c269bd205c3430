"""A request's wishes on who speaks: by channel, or by voice with what is known of the voices."""

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
    """Facts on a recording's speakers, who are told apart by their voices."""

    num: int | None = None  # how many there are
    least: int | None = None
    most: int | None = None
    known: tuple[tuple[str, bytes], ...] = ()  # names, and files in which nobody else speaks

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the known speakers."""
        return tuple(name for name, _ in self.known)


def speakers_of(request: Request) -> Speakers | None:
    """Read what a request says of its speakers; None: it does not ask who they are.

    Raises:
        OptionError: it contradicts itself, or a name or a reference is none.
    """
    known = _known_speakers(request.known_speaker_names, request.known_speaker_references)
    counts = {name: getattr(request, name) for name in _COUNTS}
    for name, count in counts.items():
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_SPEAKERS):
            raise OptionError(f"{name} = {shown(count)}; expected 1 to {MOST_SPEAKERS}")
        if count is not None and not request.diarize:
            raise OptionError(f"{name} = {count}, but no speakers are told apart; ask for {_TOLD}")
    if not request.diarize:
        if known:
            raise OptionError(f"known_speaker_names came, and no speakers are told apart; {_TOLD}")
        return None
    if request.task == "translate":
        raise OptionError(
            "diarize = true, but a translation's words are not said in their order; ask for task = "
            "transcribe"
        )
    num, least, most = counts.values()
    low, high = num or least or 1, num or most or MOST_SPEAKERS
    if not (least or 1) <= low <= high <= (most or MOST_SPEAKERS):
        given = ", ".join(f"{name} = {count}" for name, count in counts.items() if count)
        raise OptionError(f"{given}; expected numbers that can all be right")
    return Speakers(num, least, most, known)


def has_channels(request: Request) -> bool:
    """Tell whether each channel of a request's audio is a speaker's.

    Raises:
        OptionError: there are none, or speakers are told by something else.
    """
    if request.channels not in get_args(Channels):
        expected = " or ".join(get_args(Channels))
        raise OptionError(f"channels = {shown(request.channels)}; expected {expected}")
    if request.channels == "mix":
        return False
    if not isinstance(request.audio, bytes | AudioFile):
        raise OptionError("channels = split, but samples have one channel; send a file")
    if request.diarize or request.voice:
        other = "diarize" if request.diarize else "voice"
        raise OptionError(f"channels = split came with {other}; expected one of them")
    return True


def _known_speakers(
    names: Sequence[str], references: Sequence[str]
) -> tuple[tuple[str, bytes], ...]:
    """Read known speakers' names, and the files they speak in, out of data URLs (RFC 2397).

    Raises:
        OptionError: they are too many, without names or files, of one name, or no data URLs.
    """
    if len(names) != len(references) or len(names) > MOST_KNOWN:
        raise OptionError(
            f"known_speaker_names has {len(names)} and known_speaker_references {len(references)}; "
            f"expected as many of both, at most {MOST_KNOWN}"
        )
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise OptionError(f"known_speaker_names = {shown(list(names))}; expected different names")
    return tuple(zip(names, map(_file_of, references), strict=True))


def _file_of(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if head.startswith("data:") and head.endswith(";base64") and comma:
            return base64.b64decode(data, validate=True)
    except ValueError:
        pass  # below
    raise OptionError(
        f"known_speaker_references has {shown(url)}; expected data URLs in base64, such as "
        "data:audio/wav;base64,UklGR…"
    )
