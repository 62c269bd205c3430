"""Parquet files with audio, on the disk and of the Hugging Face hub."""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
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


# ---------------------------------------------------------------- hub


PREFIX = "hf:"
BRANCH = "refs/convert/parquet"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
_EXPECTED = "expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT"


def open_hub(place: str) -> Layout:
    """Open a data set by name.

    Raises:
        ConfigError: the name is malformed, or the data set has no such configuration or split; the
            message lists those that it has.
        UnavailableError: the hub does not give it; the message says why and what to do.
    """
    match = _NAME.fullmatch(place.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(f"{place}: {_EXPECTED}")
    name, config, split = match[1], match[2], match[3]
    revision, files = _parquet_files(name)
    folders = {tuple(file.split("/")[:2]) for file in files}
    if not folders:
        raise UnavailableError(f"{place}: the hub holds no Parquet copy of this data set")
    config = _one(place, "configuration", config, (folder for folder, _ in folders))
    splits = (split_of for folder, split_of in folders if folder == config)
    split = _one(place, "split", split, splits, usual="test")
    return Parquet(
        [
            f"datasets/{name}@{revision}/{file}"
            for file in sorted(files)
            if file.startswith(f"{config}/{split}/")
        ],
        _filesystem(),
        f"{name} of the Hugging Face hub, {config}, {split}, revision {revision[:12]}",
        f"{name} {revision} {config} {split}",
    )


def _one(place: str, what: str, named: str | None, known: Iterable[str], usual: str = "") -> str:
    """Choose the one that was named, the only one there is, or the usual one."""
    choices = sorted(set(known))
    if named in choices:
        return str(named)
    if named is None and len(choices) == 1:
        return choices[0]
    if named is None and usual in choices:
        return usual
    has = f"it has {', '.join(choices)}; {_EXPECTED}"
    raise ConfigError(f"{place}: no {what} {named}; {has}" if named else f"{place}: {has}")


def _filesystem() -> object:
    from huggingface_hub import HfFileSystem  # noqa: PLC0415 - only for those who need it

    return HfFileSystem()


def _parquet_files(name: str) -> tuple[str, list[str]]:
    """Return the revision of the Parquet copy, and its files: config/split/0000.parquet."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 - as above

    # A proxy's refusal or a torn connection comes as the HTTP client's own error.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    try:
        info = HfApi().dataset_info(name, revision=BRANCH, timeout=30.0)
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/datasets/{name}"
        raise UnavailableError(
            f"the terms of {name} must be accepted: do it on {page}, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnavailableError(
            f"the Hugging Face hub has no data set {name}; if it is private, `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnavailableError(f"the hub holds no Parquet copy of the data set {name}") from error
    except (http_error, OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise UnavailableError(
            f"{name} cannot be had from the Hugging Face hub: {first_line}; without a network, "
            "name a folder on this machine"
        ) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    return str(info.sha), [file for file in files if file.count("/") == 2]
