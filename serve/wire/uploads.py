"""Pass large audio to the engine as a file in the folder of the run, named by the request's key.

Each gateway process has an upload folder, named by the process's number; its keys begin with it.

The gateway writes large audio to disk, links it under the request's key, and sends the request
without audio. Clients cannot send keys. The engine's process opens the file and unlinks it at once,
so that the file disappears with the process. The gateway removes files that no engine has taken.
"""

import contextlib
import os
import re
from pathlib import Path

from serve.contract.errors import EarshotError
from serve.contract.messages import AudioFile

_UPLOADS = "uploads"  # in the folder of the run
_KEY = re.compile(r"([0-9]+)-[0-9A-Za-z]+-[0-9]+")


def folder_of(run: Path, process: int) -> Path:
    """Return the upload folder of a gateway process."""
    return run / _UPLOADS / str(process)


def make_folder(run: Path, process: int = 0) -> Path:
    """Make the upload folder of a gateway process, and empty it after a restart."""
    folder = folder_of(run, process)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.iterdir():
        file.unlink(missing_ok=True)
    return folder


def take(run: Path, key: str) -> AudioFile | None:
    """Open and unlink the file of a request; return None if there is none.

    Raises:
        EarshotError: the file cannot be opened.
    """
    match = _KEY.fullmatch(key)
    if not match:
        return None
    path = folder_of(run, int(match[1])) / key
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EarshotError(f"cannot open the uploaded audio: {error.strerror}") from error
    path.unlink(missing_ok=True)
    return AudioFile(descriptor)


def give(folder: Path, key: str, path: str) -> None:
    """Link a request's file under its key; `path` still belongs to the sender."""
    os.link(path, folder / key)


def remove(folder: Path, key: str) -> None:
    """Remove the file of a request if no engine has taken it."""
    with contextlib.suppress(OSError):
        (folder / key).unlink()
