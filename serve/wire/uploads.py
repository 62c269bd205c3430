"""Audio that comes beside its request, as a file in the run's folder under the request's key.

Each of the gateway's processes has a folder of its own for them, by its number, with which its keys
begin.

The gateway spools what is large, gives it the key's name there and sends the request without
audio. Keys are the gateway's own, clients cannot send any. The engine's process opens the file and
takes its name away at once, so that its end is the file's; what nobody took, its sender removes.
"""

import contextlib
import os
import re
from pathlib import Path

from serve.contract.errors import EarshotError
from serve.contract.messages import AudioFile

_UPLOADS = "uploads"  # in the run's folder
_KEY = re.compile(r"([0-9]+)-[0-9A-Za-z]+-[0-9]+")


def folder_of(run: Path, process: int) -> Path:
    """Return the folder where one of the gateway's processes has its uploads."""
    return run / _UPLOADS / str(process)


def make_folder(run: Path, process: int = 0) -> Path:
    """Make the folder of one of the gateway's processes, and empty it of a former one's files."""
    folder = folder_of(run, process)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for left in folder.iterdir():
        left.unlink(missing_ok=True)
    return folder


def take(run: Path, key: str) -> AudioFile | None:
    """Take the file of a request, which has no name then any more; None: there is none.

    Raises:
        EarshotError: it cannot be opened.
    """
    named = _KEY.fullmatch(key)
    if not named:
        return None
    path = folder_of(run, int(named[1])) / key
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EarshotError(f"the upload cannot be opened: {error.strerror}") from error
    path.unlink(missing_ok=True)
    return AudioFile(descriptor)


def give(folder: Path, key: str, path: str) -> None:
    """Let a request's file be found under its key; `path` stays its sender's."""
    os.link(path, folder / key)


def remove(folder: Path, key: str) -> None:
    """Remove what nobody took."""
    with contextlib.suppress(OSError):
        (folder / key).unlink()
