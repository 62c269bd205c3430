"""Recordings with reference turns: audio files, each with an RTTM of its name.

An STM of that name has the texts, too.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.speakers.diarize import SpeakerTurn

T = TypeVar("T")
AUDIO = (".wav", ".flac", ".ogg", ".mp3")


@dataclasses.dataclass(frozen=True)
class Utterance:
    """Speech of one speaker at a time, with its text."""

    speaker: str
    start_s: float
    end_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class ConversationRecording:
    """An audio file and its reference turns."""

    name: str
    path: Path
    turns: tuple[SpeakerTurn, ...]
    utterances: tuple[Utterance, ...] = ()  # in order of time; () = not known

    @property
    def speakers(self) -> int:
        """Return the number of speakers."""
        return len({turn.speaker for turn in self.turns})


def read_recordings(folder: Path) -> list[ConversationRecording]:
    """Read a folder's recordings, by name.

    Raises:
        ConfigError: it has none, or an RTTM or an STM is malformed.
        FileError: an RTTM or an STM cannot be read.
    """
    recordings = [
        _recording(path)
        for path in sorted(folder.glob("*"))
        if path.suffix in AUDIO and path.with_suffix(".rttm").is_file()
    ]
    if not recordings:
        raise ConfigError(f"{folder} has no recordings; expected audio files, each with its .rttm")
    return recordings


def _recording(path: Path) -> ConversationRecording:
    stm = path.with_suffix(".stm")
    turns = _parsed(path.with_suffix(".rttm"), _turn, "a turn of a speaker in an RTTM")
    said = _parsed(stm, _utterance, "an utterance in an STM") if stm.is_file() else ()
    return ConversationRecording(
        path.stem, path, turns, tuple(sorted(said, key=lambda one: one.start_s))
    )


def _parsed(path: Path, parse: Callable[[str], T | None], expected: str) -> tuple[T, ...]:
    found = []
    for number, line in enumerate(read_text(path, f"expected {expected}").splitlines(), 1):
        try:
            found.append(parse(line))
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path}:{number}: got {line!r}; expected {expected}") from error
    return tuple(one for one in found if one is not None)


def _turn(line: str) -> SpeakerTurn | None:
    """Parse a line of an RTTM; None for a line of another kind."""
    if not line.startswith("SPEAKER"):
        return None
    fields = line.split()
    start_s, length_s, speaker = float(fields[3]), float(fields[4]), fields[7]
    return SpeakerTurn(start_s, start_s + length_s, speaker)


def _utterance(line: str) -> Utterance | None:
    """Parse a line of an STM: file, channel, speaker, start, end and text; None for a comment."""
    if not line.strip() or line.startswith(";;"):
        return None
    fields = line.split(maxsplit=5)
    return Utterance(fields[2], float(fields[3]), float(fields[4]), "".join(fields[5:]))


def to_rttm(name: str, turns: Iterable[SpeakerTurn]) -> str:
    """Write the turns of a recording as RTTM."""
    return "".join(
        f"SPEAKER {name} 1 {turn.start_s:.3f} {turn.end_s - turn.start_s:.3f} <NA> <NA> "
        f"{turn.speaker} <NA> <NA>\n"
        for turn in turns
    )


def to_stm(name: str, utterances: Iterable[Utterance]) -> str:
    """Write the utterances of a recording as STM."""
    return "".join(
        f"{name} 1 {utterance.speaker} {utterance.start_s:.3f} {utterance.end_s:.3f} "
        f"{' '.join(utterance.text.split())}\n"
        for utterance in utterances
    )
