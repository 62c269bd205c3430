"""The audio of jobs, kept as long as they have no end. A file is there whole or not at all."""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from serve.contract.errors import ConfigError

_AUDIO = "audio"  # in the jobs' folder
_PART = ".part"
_CHUNK_BYTES = 2**20
ORPHAN_S = 3600.0  # what is younger may be of a job that is being accepted


class AudioFolder:
    """The folder.

    Args:
        folder: of all that is kept of jobs; it need not be there.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute() / _AUDIO
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"jobs.folder = {folder} cannot be made: {error.strerror}") from error

    def path(self, id: str) -> Path:
        """Return where a job's audio lies."""
        return self._folder / id

    def part(self, id: str, token: str) -> Path:
        """Return where audio grows that `seal` puts in its place."""
        return self._folder / f"{id}.{token}{_PART}"

    def keep(self, id: str, source: BinaryIO) -> str:
        """Write a file's content, so that it survives a loss of power; return its SHA-256.

        Raises:
            OSError: it cannot be written.
        """
        part, digest = self.part(id, "new"), hashlib.sha256()
        try:
            with part.open("wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
            self.seal(part, id)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return digest.hexdigest()

    def seal(self, part: Path, id: str) -> None:
        """Give a job the audio that has been written whole.

        Raises:
            OSError: the disk fails.
        """
        _sync(part)
        part.replace(self.path(id))
        _sync(self._folder)

    def copy(self, id: str, to: Path) -> None:
        """Copy a job's audio.

        Raises:
            OSError: it is not there, or there is no room.
        """
        shutil.copyfile(self.path(id), to)

    def remove(self, id: str) -> None:
        """Remove a job's audio, if it is there; what cannot be removed now is an orphan later."""
        with contextlib.suppress(OSError):
            self.path(id).unlink(missing_ok=True)

    def remove_orphans(self, ids: Collection[str]) -> None:
        """Remove what was left behind by processes that died: all that is of none of these jobs."""
        oldest = time.time() - ORPHAN_S
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in ids and path.stat().st_mtime < oldest:
                    path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
