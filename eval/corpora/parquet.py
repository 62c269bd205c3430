"""Audio and text in Parquet files, as the Hugging Face hub keeps data sets.

Texts are read first, without the audio beside them; then only the audio of the clips that were
chosen is copied into a cache, some rows at a time. Files on a hub are read in parts, as needed.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.corpora.layout import UNDERSTOOD, Columns, Entry, Layout, columns_of, language_code
from eval.record import missing_packages, replaced
from serve.contract.errors import ConfigError, UnavailableError

CACHE = Path(".cache") / "clips"
"""Audio taken out of Parquet files; relative to the project's root."""

_TEXT_ROWS = 4096  # read at a time
_AUDIO_ROWS = 16


class Parquet(Layout):
    """Rows with an `audio` of {bytes, path} and a text, in one or several files.

    Args:
        files: paths in `filesystem`, in order.
        filesystem: of fsspec.
        title: what the layout is called.
        key: names the state of the data; audio of another one is kept apart.
    """

    def __init__(self, files: Sequence[str], filesystem: Any, title: str, key: str) -> None:
        """Decide on the columns.

        Raises:
            UnavailableError: pyarrow is not installed.
            ConfigError: there is no text, or no audio, in the first file.
        """
        if missing_packages(["pyarrow"]):
            raise UnavailableError(
                f"{title} is Parquet, which needs the package pyarrow; install requirements.txt"
            )
        self._files = list(files)
        self._filesystem = filesystem
        self._cache = CACHE / hashlib.sha256(key.encode()).hexdigest()[:24]
        with self._opened(self._files[0]) as file:
            self._columns = _columns(file, self._files[0])
        self.title = f"{title}, {self._columns}"

    def entries(self) -> Iterator[Entry]:
        """Do as `Layout.entries` says; texts only, some rows at a time."""
        columns = self._columns
        wanted = [columns.text, *([columns.language] if columns.language else [])]
        for number, name in enumerate(self._files):
            with self._opened(name) as file:
                names = [*wanted, f"{columns.audio}.path"]
                row = 0
                for batch in file.iter_batches(_TEXT_ROWS, columns=names):
                    for cells in batch.to_pylist():
                        yield self._entry(number, row, cells)
                        row += 1

    def _entry(self, number: int, row: int, cells: dict[str, Any]) -> Entry:
        columns = self._columns
        path = (cells[columns.audio] or {}).get("path") or ""
        # The path may be the same in two rows, or lead anywhere: only its ending is used.
        file = f"{number:04d}-{row:07d}{Path(path).suffix}"
        language = cells[columns.language] if columns.language else None
        return Entry(
            file,
            self._cache / file,
            (cells[columns.text] or "").strip(),
            language_code(language if isinstance(language, str) else None),
            f"{self._files[number]}, row {row}",
        )

    def has_audio(self, entry: Entry) -> bool:
        """Return True: whether a row has audio is seen when it is fetched."""
        return True

    def fetch(self, chosen: Sequence[Entry]) -> None:
        """Copy the audio of these into the cache, unless it is there.

        Raises:
            ConfigError: a row has no audio in it.
            FileError: the cache cannot be written.
        """
        missing = [entry for entry in chosen if not entry.audio.is_file()]
        for number, name in enumerate(self._files):
            rows = {
                int(entry.file.partition("-")[2][:7]): entry
                for entry in missing
                if int(entry.file[:4]) == number
            }
            if rows:
                with self._opened(name) as file:
                    self._fetch_rows(file, rows)

    def _fetch_rows(self, file: Any, rows: dict[int, Entry]) -> None:
        first = 0
        for group in range(file.num_row_groups):
            length = file.metadata.row_group(group).num_rows
            if any(first <= row < first + length for row in rows):
                names = [f"{self._columns.audio}.bytes"]
                batches = file.iter_batches(_AUDIO_ROWS, row_groups=[group], columns=names)
                row = first
                for batch in batches:
                    for cell in batch.column(0):
                        if row in rows:
                            _write(rows[row], (cell.as_py() or {}).get("bytes"))
                        row += 1
            first += length

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415 - only for those who need it

        with self._filesystem.open(name, "rb") as raw:
            try:
                file = parquet.ParquetFile(raw)
            except ArrowInvalid as error:
                raise ConfigError(f"{name} is not a Parquet file: {error}") from error
            yield file


def _columns(file: Any, name: str) -> Columns:
    from pyarrow import types  # noqa: PLC0415 - as above

    schema = file.schema_arrow
    with_audio = [
        field.name
        for field in schema
        if types.is_struct(field.type) and {"bytes", "path"} <= {part.name for part in field.type}
    ]
    others = [
        field.name
        for field in schema
        if types.is_string(field.type) or types.is_large_string(field.type)
    ]
    text = columns_of(["audio", *others])
    if not with_audio or text is None:
        raise ConfigError(
            f"{name} has {', '.join(schema.names)}; expected a column of audio "
            f"(bytes and path) and one of text: {UNDERSTOOD}"
        )
    return dataclasses.replace(text, audio=with_audio[0])


def _write(entry: Entry, audio: bytes | None) -> None:
    if not audio:
        raise ConfigError(f"{entry.where} has no audio in it, only its name")
    with replaced(entry.audio) as partial:
        partial.write_bytes(audio)
