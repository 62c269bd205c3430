"""Find the recordings that a command line names: files, folders, standard input."""

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from serve.contract.errors import ConfigError
from serve.contract.files import read_bytes
from serve.speech.file_types import is_audio

STDIN = "-"


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

    Folders are searched recursively, without hidden files.

    Raises:
        ConfigError: a name does not exist, or there is no audio.
    """
    missing = [name for name in names if name != STDIN and not os.path.lexists(name)]
    if missing:
        raise ConfigError(
            f"not found: {', '.join(missing)}; expected files, folders, or - for standard input"
        )
    bases: dict[str, str] = {}  # file names and the folder that each was found from
    others = 0
    for name in names:
        if os.path.isdir(name):
            files = sorted(_walk(name))
            audio = [file for file in files if is_audio(file)]
            others += len(files) - len(audio)
            bases |= {file: bases.get(file, name) for file in audio}
        else:
            bases.setdefault(name, os.path.dirname(name))
    if not bases:
        raise ConfigError(
            f"{', '.join(names)}: no audio files, {others} other files; a file that is named "
            "itself is transcribed whatever its suffix"
        )
    return _below_common_folder(bases), others


def _walk(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in files if not name.startswith("."))


def _below_common_folder(bases: dict[str, str]) -> list[InputFile]:
    """Make each file an input once, even if two names lead to it."""
    folders = [os.path.abspath(base) for name, base in bases.items() if name != STDIN]
    common = os.path.commonpath(folders) if folders else ""
    recordings: dict[str, InputFile] = {}
    for name in bases:
        path = name if name == STDIN else os.path.abspath(name)
        relative = "stdin" if name == STDIN else Path(os.path.relpath(path, common)).as_posix()
        recordings.setdefault(path, InputFile(name, relative))
    return list(recordings.values())
