"""Parquet files with audio, on the disk and of the Hugging Face hub."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from build.clips import Clip
from eval.corpora.layout import UNDERSTOOD, Columns, Layout, columns_of, language_code
from eval.record import missing_packages, replaced
from serve.contract.errors import ConfigError, UnavailableError

CACHE = Path(".cache") / "clips"
"""Audio taken out of Parquet files; relative to the project's root."""

_TEXT_ROWS = 4096  # read at a time
_AUDIO_ROWS = 16


def local(place: Path, files: Sequence[Path]) -> Layout:
    """Read Parquet files on the disk; raises as `_layout`."""
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415 - Parquet alone

    # Rewritten files are other data: the cache goes by their times, too.
    key = " ".join(f"{file.resolve()} {file.stat().st_mtime_ns}" for file in files)
    names = [str(file) for file in files]
    return _layout(names, LocalFileSystem(), f"{len(files)} Parquet files of {place.name}", key)


def _layout(files: Sequence[str], filesystem: Any, title: str, key: str) -> Layout:
    """Read the texts of rows with an `audio` of {bytes, path}; `fetch` reads the audio.

    Args:
        files: paths in `filesystem`, in order.
        filesystem: fsspec's file system.
        title: names the layout.
        key: names the state of the data; audio of another one is kept apart.

    Raises:
        UnavailableError: pyarrow is not installed.
        ConfigError: a file is not Parquet, or has no text or no audio.
    """
    if missing_packages(["pyarrow"]):
        raise UnavailableError(
            f"{title} is Parquet, which needs the package pyarrow; install requirements.txt"
        )
    folder = CACHE / hashlib.sha256(key.encode()).hexdigest()[:24]
    clips: list[tuple[str, Clip]] = []
    rows: dict[str, dict[str, int]] = {name: {} for name in files}  # numbers by clip
    for number, name in enumerate(files):
        with _open(filesystem, name) as file:
            columns = _columns(file, name)
            wanted = [columns.text, *filter(None, [columns.language]), f"{columns.audio}.path"]
            batches = file.iter_batches(_TEXT_ROWS, columns=wanted)
            for row, cells in enumerate(cells for b in batches for cells in b.to_pylist()):
                path = (cells[columns.audio] or {}).get("path") or ""
                # The path may be the same in two rows, or lead anywhere: only its ending is used.
                clip = f"{number:04d}-{row:07d}{Path(path).suffix}"
                text = (cells[columns.text] or "").strip()
                language = cells[columns.language] if columns.language else None
                code = language_code(language if isinstance(language, str) else None)
                clips.append((f"{name}, row {row}", Clip(clip, folder / clip, text, code, 0.0)))
                rows[name][clip] = row

    def fetch(chosen: Sequence[Clip]) -> None:
        missing = {clip.file: clip.path for clip in chosen if not clip.path.is_file()}
        for name, numbers in rows.items():
            paths = {numbers[clip]: path for clip, path in missing.items() if clip in numbers}
            if paths:
                with _open(filesystem, name) as file:
                    _fetch_rows(file, name, paths)

    return Layout(f"{title}, {columns}", clips, fetch=fetch)


def _fetch_rows(file: Any, name: str, paths: dict[int, Path]) -> None:
    """Write the audio of rows, by number, to these paths; other row groups are not read."""
    column, row = f"{_columns(file, name).audio}.bytes", 0
    for group in range(file.num_row_groups):
        end = row + file.metadata.row_group(group).num_rows
        if any(row <= number < end for number in paths):
            batches = file.iter_batches(_AUDIO_ROWS, row_groups=[group], columns=[column])
            cells = (cell for batch in batches for cell in batch.column(0))
            for number, cell in enumerate(cells, row):
                if number in paths:
                    audio = (cell.as_py() or {}).get("bytes")
                    if not audio:
                        raise ConfigError(f"{name}, row {number} has no audio in it, only its name")
                    with replaced(paths[number]) as partial:
                        partial.write_bytes(audio)
        row = end


def _open(filesystem: Any, name: str) -> Any:
    """Open a Parquet file, for a `with` block."""
    from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415 - loads what few places need

    try:
        return parquet.ParquetFile(name, filesystem=filesystem)
    except ArrowInvalid as error:
        raise ConfigError(f"{name} is not a Parquet file: {error}") from error


def _columns(file: Any, name: str) -> Columns:
    from pyarrow import types  # noqa: PLC0415 - as above

    audio, texts = list[str](), list[str]()
    for field in file.schema_arrow:
        if types.is_struct(field.type) and {"bytes", "path"} <= {part.name for part in field.type}:
            audio.append(field.name)
        elif types.is_string(field.type) or types.is_large_string(field.type):
            texts.append(field.name)
    columns = columns_of(["audio", *texts])
    if not audio or columns is None:
        raise ConfigError(
            f"{name} has {', '.join(file.schema_arrow.names)}; expected a column of audio "
            f"(bytes and path) and one of text: {UNDERSTOOD}"
        )
    return dataclasses.replace(columns, audio=audio[0])


# ---------------------------------------------------------------- hub


PREFIX = "hf:"
BRANCH = "refs/convert/parquet"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
_EXPECTED = "expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT"


def hub(place: str) -> Layout:
    """Read a data set of the hub by name.

    Raises:
        ConfigError: the name is malformed, or the data set has no such configuration or split; the
            message lists those that it has.
        UnavailableError: the hub does not give it; the message says why and what to do.
    """
    from huggingface_hub import HfFileSystem  # noqa: PLC0415 - loads what few places need

    match = _NAME.fullmatch(place.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(f"{place}: {_EXPECTED}")
    name, config, split = match[1], match[2], match[3]
    revision, files = _parquet_files(name)
    folders = {tuple(file.split("/")[:2]) for file in files}
    if not folders:
        raise UnavailableError(f"{place}: the hub holds no Parquet copy of this data set")
    config = _choose(place, "configuration", config, (folder for folder, _ in folders))
    splits = (split_of for folder, split_of in folders if folder == config)
    split = _choose(place, "split", split, splits, usual="test")
    return _layout(
        [
            f"datasets/{name}@{revision}/{file}"
            for file in sorted(files)
            if file.startswith(f"{config}/{split}/")
        ],
        HfFileSystem(),
        f"{name} of the Hugging Face hub, {config}, {split}, revision {revision[:12]}",
        f"{name} {revision} {config} {split}",
    )


def _choose(place: str, kind: str, named: str | None, known: Iterable[str], usual: str = "") -> str:
    """Choose the configuration or split that was named, the only one, or the usual one."""
    choices = sorted(set(known))
    if named in choices:
        return str(named)
    if named is None and len(choices) == 1:
        return choices[0]
    if named is None and usual in choices:
        return usual
    has = f"it has {', '.join(choices)}; {_EXPECTED}"
    raise ConfigError(f"{place}: no {kind} {named}; {has}" if named else f"{place}: {has}")


def _parquet_files(name: str) -> tuple[str, list[str]]:
    """Return the revision of the Parquet copy, and its files: config/split/0000.parquet."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 - as above

    # A proxy's refusal or a torn connection comes as the HTTP client's own error.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    try:
        info = HfApi().dataset_info(name, revision=BRANCH, timeout=30.0)
    except (http_error, OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise UnavailableError(
            f"{name} cannot be had from the Hugging Face hub: {first_line}; expected a data set "
            "with a Parquet copy. If it has terms, accept them on "
            f"https://huggingface.co/datasets/{name}; if it is private, `hf auth login`; without "
            "a network, name a folder on this machine"
        ) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    return str(info.sha), [file for file in files if file.count("/") == 2]
