"""Files of results: written whole or not at all, and read with errors that say what is wrong."""

import json
import os
from pathlib import Path
from typing import Any

from serve.errors import ConfigError
from serve.files import read_text


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it first, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        FileError: it cannot be read.
        ConfigError: it holds something else; `what` says what it should be.
    """
    text = read_text(path, f"expected {what}")
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON, expected {what}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds a {type(fields).__name__}, expected {what}")
    return fields
