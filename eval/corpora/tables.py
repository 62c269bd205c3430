"""References in a table beside the audio: CSV with any usual delimiter, or JSONL.

Common Voice's own layout is such a table too: a TSV whose audio lies in clips/ beside it.
"""

import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from build.clips import load_clips
from eval.corpora.layout import UNDERSTOOD, Columns, Entry, Layout, columns_of, language_code
from serve.contract.errors import ConfigError, FileError

DELIMITERS = ",\t;|"
CLIPS = "clips"  # Common Voice's folder of audio


class Table(Layout):
    """A CSV, TSV or JSONL file; each line names an audio file, relative to `folder`."""

    def __init__(self, path: Path, title: str, folder: Path | None = None) -> None:
        """Decide on the columns.

        Raises:
            FileError: the file cannot be read.
            ConfigError: it has no column for audio, or none for text.
        """
        self._path = path
        self._folder = folder or path.parent
        self._delimiter = None if is_jsonl(path) else _delimiter(path)
        with _opened(path) as file:
            names = next((list(row) for _, row in self._rows(file)), None)
        columns = columns_of(names or [])
        if columns is None:
            raise ConfigError(
                f"{path} has {', '.join(names) if names else 'no lines'}; expected {UNDERSTOOD}"
            )
        self._columns: Columns = columns
        self.title = f"{title}, {columns}"

    def entries(self) -> Iterator[Entry]:
        """Do as `Layout.entries` says; a line is read when it is asked for."""
        with _opened(self._path) as file:
            for number, row in self._rows(file):
                yield self._entry(row, f"{self._path.name}:{number}")

    def _rows(self, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield lines by number, each by key."""
        if self._delimiter is None:
            yield from _json_rows(file, self._path)
            return
        # NOTE: tables with tabs, Common Voice's among them, have unpaired quotes in their texts.
        reader: csv.DictReader[str]
        if self._delimiter == "\t":
            reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.DictReader(file, delimiter=self._delimiter)
        try:
            for row in reader:
                yield reader.line_num, {name: value for name, value in row.items() if name}
        except csv.Error as error:
            raise ConfigError(f"{self._path}:{reader.line_num}: {error}") from error

    def _entry(self, row: dict[str, Any], where: str) -> Entry:
        def cell(name: str | None) -> str:
            value = row.get(name) if name else None
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{where}: `{name}` is {value!r}; expected text")
            return _unquoted((value or "").strip()) if self._delimiter == "\t" else value or ""

        file = cell(self._columns.audio).strip()
        text = cell(self._columns.text).strip()
        language = language_code(cell(self._columns.language))
        return Entry(file, self._folder / file, text, language, where)

    def has_audio(self, entry: Entry) -> bool:
        """Do as `Layout.has_audio` says; an empty cell names none."""
        return bool(entry.file) and super().has_audio(entry)


class Manifest(Layout):
    """A manifest of ours: see `build.clips`. Its empty texts say that nobody speaks."""

    title = "a manifest of clips"

    def __init__(self, path: Path) -> None:
        """Read and check it.

        Raises:
            FileError, ConfigError: as `build.clips.load_clips`.
        """
        self._clips = load_clips(path)

    def entries(self) -> Iterator[Entry]:
        """Do as `Layout.entries` says."""
        for clip in self._clips:
            yield Entry(
                file=clip.file,
                audio=clip.path,
                text=clip.text,
                language=clip.language,
                where=clip.file,
                duration_s=clip.duration_s,
                group=clip.group,
                speaker=clip.speaker,
                half=clip.half,
            )

    def may_be_silent(self) -> bool:
        """Do as `Layout.may_be_silent` says."""
        return True


def open_table(path: Path) -> Layout:
    """Open a file with references: a manifest of ours, or any table.

    Raises:
        FileError, ConfigError: as `Table` and `Manifest`.
    """
    if is_jsonl(path):
        with _opened(path) as file:
            first: dict[str, Any] = next((row for _, row in _json_rows(file, path)), {})
        if {"file", "text", "language", "duration"} <= first.keys():
            return Manifest(path)
    return Table(path, f"the table {path.name}")


def is_jsonl(path: Path) -> bool:
    """Return whether a file's name says that it holds a JSON object a line."""
    return path.suffix.casefold() in (".jsonl", ".json", ".ndjson")


def _json_rows(file: TextIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number} is {line.strip()[:40]}; expected an object a line")
        yield number, row


def _delimiter(path: Path) -> str:
    """Find the delimiter that splits the first line into known keys; a comma where none does."""
    with _opened(path) as file:
        header = file.readline()
    for delimiter in DELIMITERS:
        names = next(csv.reader([header], delimiter=delimiter), [])
        if columns_of(names):
            return delimiter
    return ","


def _unquoted(cell: str) -> str:
    """Restore a cell as it was before somebody's CSV writer put quotes around it."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        return cell[1:-1].replace('""', '"')
    return cell


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise FileError(
            f"cannot read {path}: {error.strerror}; expected a table of references"
        ) from error
    except UnicodeDecodeError as error:
        raise FileError(f"cannot read {path}: it is not UTF-8 ({error.reason})") from error
