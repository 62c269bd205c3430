"""Parquet files with audio, on the disk and of the Hugging Face hub."""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from build.clips import Clip
from eval.corpora.layout import UNDERSTOOD, Columns, Layout, columns_of, language_code
from eval.record import replaced
from serve.contract.errors import ConfigError, UnavailableError

CACHE = Path(".cache") / "clips"
"""Audio taken out of Parquet files; relative to the project's root."""

_AUDIO_ROWS = 16  # read at a time


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
        ConfigError: a file is not Parquet, or has no text or no audio.
    """
    folder = CACHE / hashlib.sha256(key.encode()).hexdigest()[:24]
    clips: list[tuple[str, Clip]] = []
    rows: dict[str, tuple[str, int]] = {}  # file and row by clip
    for number, name in enumerate(files):
        with _open(filesystem, name) as file:
            columns = _columns(file, name)
            wanted = [columns.text, *filter(None, [columns.language]), f"{columns.audio}.path"]
            batches = file.iter_batches(columns=wanted)
            for row, cells in enumerate(cells for b in batches for cells in b.to_pylist()):
                path = (cells[columns.audio] or {}).get("path") or ""
                # The path may be the same in two rows, or lead anywhere: only its ending is used.
                clip = f"{number:04d}-{row:07d}{Path(path).suffix}"
                text = (cells[columns.text] or "").strip()
                code = language_code(cells[columns.language] if columns.language else None)
                clips.append((f"{name}, row {row}", Clip(clip, folder / clip, text, code, 0.0)))
                rows[clip] = (name, row)

    def fetch(chosen: Sequence[Clip]) -> None:
        missing = collections.defaultdict[str, dict[int, Path]](dict)
        for clip in chosen:
            if not clip.path.is_file():
                name, row = rows[clip.file]
                missing[name][row] = clip.path
        for name, paths in missing.items():
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
_EXPECTED = "expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT"


def hub(place: str) -> Layout:
    """Read a data set of the hub by name: the named split, its only one, or the one named test.

    Raises:
        ConfigError: the name is malformed, or several splits fit or none; the message lists them.
        UnavailableError: the hub does not give it; the message says why and what to do.
    """
    from huggingface_hub import HfApi, HfFileSystem, errors  # noqa: PLC0415 - seldom needed

    name, *parts = place.removeprefix(PREFIX).split(":")
    if name.count("/") != 1:
        raise ConfigError(f"{place}: {_EXPECTED}")
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
    # The copy's files are CONFIG/SPLIT/0000.parquet.
    files = sorted(s.rfilename for s in info.siblings or [] if s.rfilename.count("/") == 2)
    known = sorted({file.rpartition("/")[0] for file in files})
    splits = [split for split in known if split.split("/")[: len(parts)] == parts]
    if len(splits) > 1:
        splits = [split for split in splits if split.endswith("/test")]
    if len(splits) != 1:
        if not known:
            raise UnavailableError(f"{place}: the hub holds no Parquet copy of this data set")
        has = ", ".join(split.replace("/", ":") for split in known)
        raise ConfigError(f"{place}: it has {has}; {_EXPECTED}")
    return _layout(
        [f"datasets/{name}@{info.sha}/{f}" for f in files if f.startswith(f"{splits[0]}/")],
        HfFileSystem(),
        f"{name} of the Hugging Face hub, {splits[0]}, revision {str(info.sha)[:12]}",
        f"{name} {info.sha} {splits[0]}",
    )
