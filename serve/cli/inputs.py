"""The recordings that a command line names: files, folders, patterns, standard input."""

import dataclasses
import glob
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from serve.contract.errors import ConfigError
from serve.contract.files import read_bytes
from serve.speech.file_types import is_audio

STDIN = "-"
_TOLD = 5  # names of files that are not there


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A source of audio."""

    name: str  # as it was named, or found in what was named; "-" is standard input
    path: str  # below the folder that all of them have in common, with /

    def read(self) -> bytes:
        """Its bytes.

        Raises:
            FileError: it cannot be read.
        """
        return sys.stdin.buffer.read() if self.name == STDIN else read_bytes(self.name)


def readable(name: str) -> str:
    """Return a file's name as text, whatever bytes it has."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def find_recordings(names: Sequence[str]) -> tuple[list[InputFile], int]:
    """The recordings that are named, each once, and how many other files the folders hold.

    A folder is searched with the folders in it; hidden files are left out. A pattern stands for
    all that fits it, as in a shell; ** is any number of folders.

    Raises:
        ConfigError: one is not there, or nothing is left.
    """
    bases: dict[str, Path] = {}  # names, and the folder each was looked for in
    others = 0
    missing = [name for name in names if not _matches(name)]
    for name in names:
        for match in _matches(name):
            if os.path.isdir(match):
                audio, passed = _in_folder(match)
                bases |= {file: bases.get(file, Path(match)) for file in audio}
                others += passed
            else:
                bases.setdefault(match, _base(name))
    if missing:
        more = f" and {len(missing) - _TOLD} more" if len(missing) > _TOLD else ""
        raise ConfigError(
            f"there is no {', '.join(missing[:_TOLD])}{more}; expected files, folders, patterns, "
            "or - for standard input"
        )
    if not bases:
        raise ConfigError(
            f"{', '.join(names)}: no audio, {others} files of other kinds; name files to have them "
            "transcribed whatever they are called"
        )
    return _below_common_folder(bases), others


def _matches(name: str) -> list[str]:
    if name == STDIN or os.path.lexists(name):
        return [name]
    return sorted(glob.glob(name, recursive=True))


def _base(name: str) -> Path:
    """The folder that a file's name, or a pattern, begins with."""
    parent = Path(name).parent
    if os.path.lexists(name):
        return parent
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parent.parts))


def _in_folder(folder: str) -> tuple[list[str], int]:
    """The audio in a folder and those in it, in order of names, and the number of other files."""
    files = sorted(_walk(folder))
    audio = [file for file in files if is_audio(file)]
    return audio, len(files) - len(audio)


def _walk(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in files if not name.startswith("."))


def _below_common_folder(bases: dict[str, Path]) -> list[InputFile]:
    """Each once, though it was named in two ways."""
    folders = [os.path.abspath(base) for name, base in bases.items() if name != STDIN]
    common = os.path.commonpath(folders) if folders else ""
    recordings: dict[str, InputFile] = {}
    for name in bases:
        if name == STDIN:
            recordings[STDIN] = InputFile(STDIN, "stdin")
        else:
            path = os.path.abspath(name)
            relative = Path(os.path.relpath(path, common)).as_posix()
            recordings.setdefault(path, InputFile(name, relative))
    return list(recordings.values())
