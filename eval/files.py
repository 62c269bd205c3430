"""Files of results: written whole or not at all, and read with errors that say what is wrong."""

import os
from pathlib import Path
from typing import Any, TypeVar

from serve.contract.codec import from_json, to_json
from serve.contract.errors import FileError
from serve.contract.files import read_text

T = TypeVar("T")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it first, then renamed over it.

    Raises:
        FileError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    """Write dataclasses, or plain values that hold some, as JSON; raises as `write_text`."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: Path, kind: type[T], what: str) -> T:
    """Read what `write_json` wrote.

    Raises:
        FileError: it cannot be read.
        ConfigError: it holds something else; `what` says what it should be.
    """
    expected = f"expected {what}"
    return from_json(kind, read_text(path, expected), str(path), advice=expected)
