"""Files of results: written whole or not at all, and read with errors that say what is wrong."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from serve.contract.codec import from_json, to_json
from serve.contract.errors import FileError
from serve.contract.files import read_text

T = TypeVar("T")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the path of a file beside this one, which takes its place when the block succeeds.

    Raises:
        FileError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have a folder made, whole or not at all, unless it is there; `make` fills another one."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="composing-", dir=folder.parent, ignore_cleanup_errors=True
    ) as partial:
        make(Path(partial))
        os.replace(partial, folder)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises as `replaced`."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write dataclasses, or plain values that hold some, as JSON; raises as `write_text`."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_jsonl(path: Path, values: Iterable[Any]) -> None:
    """Write dataclasses as JSON, one a line; raises as `replaced`."""
    write_text(path, "".join(to_json(value) + "\n" for value in values))


def read_jsonl(path: Path, kind: type[T], expected: str, advice: str = "") -> list[T]:
    """Read what `write_jsonl` wrote.

    Raises:
        FileError: it cannot be read; `expected` is in the message.
        ConfigError: a line is no `kind`; the message names the line and ends with the advice.
    """
    return [
        from_json(kind, line, f"{path}:{number}", advice=advice)
        for number, line in enumerate(read_text(path, expected).split("\n"), 1)
        if line
    ]


def read_json(path: Path, kind: type[T], what: str) -> T:
    """Read what `write_json` wrote.

    Raises:
        FileError: it cannot be read.
        ConfigError: it holds something else; `what` says what it should be.
    """
    expected = f"expected {what}"
    return from_json(kind, read_text(path, expected), str(path), advice=expected)
