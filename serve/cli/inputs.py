"""Find the recordings that a command line names: files, folders, patterns, standard input."""

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
_SHOWN = 5  # missing names in an error message


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A source of audio."""

    name: str  # the argument, or a file found below it; "-" is standard input
    path: str  # relative to the common folder of all inputs, with /

    def read(self) -> bytes:
        """Read the file or standard input.

        Raises:
            FileError: the file cannot be read.
        """
        return sys.stdin.buffer.read() if self.name == STDIN else read_bytes(self.name)


def readable(name: str) -> str:
    """Return a file's name as text; bytes that are not UTF-8 are replaced."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def find_recordings(names: Sequence[str]) -> tuple[list[InputFile], int]:
    """Return the named recordings, each once, and the number of other files in the folders.

    Folders are searched recursively, without hidden files. Patterns are expanded as in a shell;
    ** is any number of folders.

    Raises:
        ConfigError: a name does not exist, or there is no audio.
    """
    bases: dict[str, Path] = {}  # file names and the folder that each was found from
    others = 0
    missing = []
    for name in names:
        matches = _matches(name)
        missing += [] if matches else [name]
        for match in matches:
            if os.path.isdir(match):
                files = sorted(_walk(match))
                audio = [file for file in files if is_audio(file)]
                others += len(files) - len(audio)
                bases |= {file: bases.get(file, Path(match)) for file in audio}
            else:
                bases.setdefault(match, _base(name))
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"not found: {', '.join(missing[:_SHOWN])}{more}; expected files, folders, patterns, "
            "or - for standard input"
        )
    if not bases:
        raise ConfigError(
            f"{', '.join(names)}: no audio files, {others} other files; a file that is named "
            "itself is transcribed whatever its suffix"
        )
    return _below_common_folder(bases), others


def _matches(name: str) -> list[str]:
    if name == STDIN or os.path.lexists(name):
        return [name]
    return sorted(glob.glob(name, recursive=True))


def _base(name: str) -> Path:
    """Return the folder of a file, or the leading folders of a pattern without wildcards."""
    parent = Path(name).parent
    if os.path.lexists(name):
        return parent
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parent.parts))


def _walk(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in files if not name.startswith("."))


def _below_common_folder(bases: dict[str, Path]) -> list[InputFile]:
    """Make each file an input once, even if two names lead to it."""
    folders = [os.path.abspath(base) for name, base in bases.items() if name != STDIN]
    common = os.path.commonpath(folders) if folders else ""
    recordings: dict[str, InputFile] = {}
    for name in bases:
        path = name if name == STDIN else os.path.abspath(name)
        relative = "stdin" if name == STDIN else Path(os.path.relpath(path, common)).as_posix()
        recordings.setdefault(path, InputFile(name, relative))
    return list(recordings.values())
