"""The audio of jobs in an object store, where several servers find it.

fsspec reaches the store, by the keys and the endpoint that the environment names.
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path

import fsspec

from serve.contract.errors import ConfigError, FileError

_ID = re.compile(r"job_[0-9a-f]{32}")


class AudioStore:
    """A folder of a store, in which each job's audio has the job's id as its name.

    Args:
        address: such as s3://bucket/folder.

    Raises:
        ConfigError: it cannot be reached from here.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            self._files, self._folder = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(
                f"jobs.store = {address} cannot be used: {error}; expected a store that fsspec "
                "reaches, such as s3://bucket/folder once s3fs is installed"
            ) from error

    def put(self, id: str, path: Path) -> None:
        """Store a job's audio, whole.

        Raises:
            FileError: that failed.
        """
        with self._failing("takes nothing"):
            self._files.put_file(str(path), self._name(id))

    def get(self, id: str, to: Path) -> bool:
        """Copy a job's audio into a file; return whether there is any.

        Raises:
            FileError: that failed.
        """
        with self._failing("gives nothing"):
            try:
                self._files.get_file(self._name(id), str(to))
            except FileNotFoundError:
                return False
        return True

    def remove(self, id: str) -> None:
        """Remove a job's audio, if it is there.

        Raises:
            FileError: that failed.
        """
        with self._failing("removes nothing"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._name(id))

    def remove_others(self, ids: Collection[str], before: datetime) -> None:
        """Remove the audio of all other jobs that is older than a moment; what is no job's stays.

        Raises:
            FileError: that failed.
        """
        with self._failing("lists nothing"):
            self._files.invalidate_cache()
            there = {name.rpartition("/")[2]: name for name in self._files.find(self._folder, 1)}
            others = [id for id in there if _ID.fullmatch(id) and id not in ids]
            old = [id for id in others if self._files.modified(there[id]) < before]
        for id in old:
            self.remove(id)

    def _name(self, id: str) -> str:
        return f"{self._folder}/{id}"

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        # Each store has exceptions of its own, some of which are no OSError.
        try:
            yield
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise FileError(f"jobs.store = {self._address} {what}: {why}") from error
