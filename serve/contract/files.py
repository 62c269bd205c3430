"""Reading and writing the files that a person names: audio, configs, manifests, transcripts.

One error for all of them, `FileError`, with the path, the reason and what to do. Files of engines
and checkpoints have errors of their own.
"""

import contextlib
import os
import uuid
from pathlib import Path

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
    partial = path.with_name(f".{uuid.uuid4().hex}")
    try:
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it has its name
                partial.unlink()
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}; {advice}") from error
