"""Recordings of which is known who speaks when: audio files with an RTTM of the same name each."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.speakers.diarize import Turn

AUDIO = (".wav", ".flac", ".ogg", ".mp3")


@dataclasses.dataclass(frozen=True)
class Recording:
    """An audio file and who speaks when in it."""

    name: str
    path: Path
    turns: tuple[Turn, ...]

    @property
    def speakers(self) -> int:
        """How many speak."""
        return len({turn.speaker for turn in self.turns})


def read_recordings(folder: Path) -> list[Recording]:
    """Read a folder's recordings, by name.

    Raises:
        ConfigError: it has none, or an RTTM is malformed.
        FileError: an RTTM cannot be read.
    """
    found = [
        Recording(path.stem, path, parse_rttm(read_text(rttm, "expected an RTTM"), str(rttm)))
        for path in sorted(folder.glob("*"))
        if path.suffix in AUDIO and (rttm := path.with_suffix(".rttm")).is_file()
    ]
    if not found:
        raise ConfigError(f"{folder} has no recordings; expected audio files, each with its .rttm")
    return found


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


def halves(recordings: Sequence[Recording]) -> dict[str, list[Recording]]:
    """Every second one, by name: settings are chosen on these, figures are of the others."""
    return {"choose": list(recordings[::2]), "report": list(recordings[1::2])}
