"""Read and write the files that a user names: audio, configs, manifests, transcripts.

Every failure is a `FileError` with the path, the reason and what to do. Engines and checkpoints
have their own errors.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from serve.contract.errors import FileError

_ADVICE = "expected a file that exists and is readable"


def read_bytes(path: str | Path, advice: str = _ADVICE) -> bytes:
    """Read a file's content.

    Args:
        path: the path; the error message shows it unchanged.
        advice: the end of the error message: what to do.

    Raises:
        FileError: the path is missing, a folder or not permitted, or the disk fails.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; {advice}") from error


def read_text(path: str | Path, advice: str = _ADVICE) -> str:
    """Read a UTF-8 file's content; see `read_bytes` for the arguments.

    Raises:
        FileError: the file cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(path, advice).decode()
    except UnicodeDecodeError as error:
        raise FileError(
            f"cannot read {path}: byte {error.start} is not UTF-8 ({error.reason}); {advice}"
        ) from error


def write_text(
    path: Path, text: str, advice: str = "choose another file", mode: int = 0o666
) -> None:
    """Write a UTF-8 file atomically; after a crash the path has the old content or the new one.

    Args:
        path: the path, in an existing folder; an older file is replaced.
        text: the content.
        advice: the end of the error message: what to do.
        mode: the file's permissions before the umask.

    Raises:
        FileError: the file cannot be written, for example on a full disk; an older file is kept.
    """
    # The partial file's name depends on `path` only, so a retry overwrites a killed attempt's file.
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()
    partial = path.with_name(f".{digest[:16]}.partial")
    try:
        with _open_locked(partial, mode) as file:
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


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _open_locked(path: Path, mode: int) -> Iterator[IO[bytes]]:
    """Create an empty file, or truncate it, and hold its lock until the block ends."""
    while True:
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_named(file, path):  # else its previous owner renamed or removed it: try again
                file.truncate(0)
                yield file
                return


def _is_named(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, to one process at a time, and remove it at the end.

    A folder that a killed process left is removed first. The file of the lock stays.

    Raises:
        FileError: that folder cannot be removed.
        OSError: the new one cannot be made.
    """
    partial, lock = target.with_name(f".{target.name}.partial"), f".{target.name}.lock"
    descriptor = os.open(target.with_name(lock), os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            shutil.rmtree(partial)
        except FileNotFoundError:
            pass
        except OSError as error:
            reason = f"cannot remove {error.filename}: {error.strerror}; remove {partial}"
            raise FileError(reason) from error
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(descriptor)
