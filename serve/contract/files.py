"""Reading and writing the files that a person names: audio, configs, manifests, transcripts.

One error for all of them, `FileError`, with the path, the reason and what to do. Files of engines
and checkpoints have errors of their own.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from serve.contract.errors import FileError

_ADVICE = "name a file that exists and that you may read"


def read_bytes(path: str | Path, advice: str = _ADVICE) -> bytes:
    """Read a file's content.

    Args:
        path: as it was named; it stands so in the error.
        advice: what to do if it cannot be read.

    Raises:
        FileError: it is missing, a folder, not permitted, or the disk fails.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; {advice}") from error


def read_text(path: str | Path, advice: str = _ADVICE) -> str:
    """Read a UTF-8 file's content; arguments as for `read_bytes`.

    Raises:
        FileError: it cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(path, advice).decode()
    except UnicodeDecodeError as error:
        raise FileError(
            f"cannot read {path}: byte {error.start} is not UTF-8 ({error.reason}); {advice}"
        ) from error


def write_text(path: Path, text: str, advice: str = "name another file") -> None:
    """Write a UTF-8 file that is there whole or not at all, whatever ends the process.

    Args:
        path: of the file, in a folder that exists; an older file is replaced.
        text: its content.
        advice: what to do if it cannot be written.

    Raises:
        FileError: it cannot be written, as on a full disk; an older file stays as it was.
    """
    # The same name in each try, so that a killed process leaves one that the next try takes.
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()
    partial = path.with_name(f".{digest[:16]}.partial")
    try:
        with _locked(partial) as file:
            try:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}; {advice}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open an empty file that no other process writes until the block ends."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_named(file, path):  # else the process that had it has renamed or removed it
                file.truncate(0)
                yield file
                return


def _is_named(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
