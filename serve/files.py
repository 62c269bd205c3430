"""Reading the files that a person names: audio, configs, manifests, predictions.

One error for all of them, `FileError`, with the path, the reason and what to do. Files of engines
and checkpoints have errors of their own.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from serve.errors import FileError

_ADVICE = "name a file that exists and that you may read"


def read_bytes(path: str | Path, advice: str = _ADVICE) -> bytes:
    """A file's content.

    Args:
        path: as it was named; it stands so in the error.
        advice: what to do if it cannot be read.

    Raises:
        FileError: it is missing, a folder, not permitted, or the disk fails.
    """
    with _file_errors(path, advice):
        return Path(path).read_bytes()


def read_text(path: str | Path, advice: str = _ADVICE) -> str:
    """A UTF-8 file's content; arguments as for `read_bytes`.

    Raises:
        FileError: it cannot be read, or is not UTF-8.
    """
    with _file_errors(path, advice):
        return Path(path).read_text(encoding="utf-8")


@contextlib.contextmanager
def _file_errors(path: str | Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; {advice}") from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"cannot read {path}: byte {error.start} is not UTF-8 ({error.reason}); {advice}"
        ) from error
