"""Recordings of which is known who speaks when: audio files with an RTTM of the same name each.

An STM of that name tells what they say, too.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.speakers.diarize import Turn

AUDIO = (".wav", ".flac", ".ogg", ".mp3")


@dataclasses.dataclass(frozen=True)
class Utterance:
    """Speech of one speaker at a time, with its text."""

    speaker: str
    start_s: float
    end_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class Recording:
    """An audio file and who speaks when in it."""

    name: str
    path: Path
    turns: tuple[Turn, ...]
    utterances: tuple[Utterance, ...] = ()  # in order of time; () = not known

    @property
    def speakers(self) -> int:
        """Return how many speak."""
        return len({turn.speaker for turn in self.turns})


def read_recordings(folder: Path) -> list[Recording]:
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


def _recording(path: Path) -> Recording:
    rttm, stm = path.with_suffix(".rttm"), path.with_suffix(".stm")
    turns = parse_rttm(read_text(rttm, "expected an RTTM"), str(rttm))
    utterances = parse_stm(read_text(stm, "expected an STM"), str(stm)) if stm.is_file() else ()
    return Recording(path.stem, path, turns, utterances)


def parse_rttm(text: str, where: str) -> tuple[Turn, ...]:
    """The turns of an RTTM.

    Raises:
        ConfigError: a line is malformed; the message names it.
    """
    turns = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("SPEAKER"):
            continue
        fields = line.split()
        try:
            start_s, length_s, speaker = float(fields[3]), float(fields[4]), fields[7]
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{where}:{number}: {line!r} is no turn of a speaker") from error
        turns.append(Turn(start_s, start_s + length_s, speaker))
    return tuple(turns)


def to_rttm(name: str, turns: Iterable[Turn]) -> str:
    """The turns of a recording as RTTM."""
    return "".join(
        f"SPEAKER {name} 1 {turn.start_s:.3f} {turn.end_s - turn.start_s:.3f} <NA> <NA> "
        f"{turn.speaker} <NA> <NA>\n"
        for turn in turns
    )


def parse_stm(text: str, where: str) -> tuple[Utterance, ...]:
    """Parse an STM: file, channel, speaker, start, end and text on each line.

    Raises:
        ConfigError: a line is malformed; the message names it.
    """
    utterances = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith(";;"):
            continue
        fields = line.split(maxsplit=5)
        try:
            speaker, start_s, end_s = fields[2], float(fields[3]), float(fields[4])
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{where}:{number}: {line!r} is nothing that is said") from error
        utterances.append(Utterance(speaker, start_s, end_s, "".join(fields[5:])))
    return tuple(sorted(utterances, key=lambda utterance: utterance.start_s))


def to_stm(name: str, utterances: Iterable[Utterance]) -> str:
    """Write what is said in a recording as STM."""
    return "".join(
        f"{name} 1 {utterance.speaker} {utterance.start_s:.3f} {utterance.end_s:.3f} "
        f"{' '.join(utterance.text.split())}\n"
        for utterance in utterances
    )


def halves(recordings: Sequence[Recording]) -> dict[str, list[Recording]]:
    """Every second one, by name: settings are chosen on these, figures are of the others."""
    return {"choose": list(recordings[::2]), "report": list(recordings[1::2])}
