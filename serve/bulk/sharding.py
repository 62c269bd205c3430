"""Divide the files of a run into shards, and find the shards that are done.

A shard is a number of consecutive files, ordered by name or as in the manifest. It is done if
its file of transcripts exists, which is written last and atomically. Running a command again
therefore transcribes only the missing shards. `run.json` has the settings of the run, so that
another run cannot use its folder.

    OUTPUT/run.json
    OUTPUT/transcripts/000000.jsonl   or .parquet: a line or row for each transcribed file
    OUTPUT/files/talk.srt             a file for each recording, with formats such as srt
    OUTPUT/failed/000000.jsonl        `file` and `error` of each failed file, if there are any
    OUTPUT/failed.jsonl               all of them, at the end; also a manifest to try them again
"""

import dataclasses
import hashlib
import json
import posixpath
import re
from collections.abc import Sequence
from typing import Any, Literal

from pyarrow import fs

from serve.bulk import store
from serve.contract.codec import flat, from_json, to_json
from serve.contract.errors import ConfigError
from serve.speech import formats
from serve.speech.cues import DEFAULT, CueOptions
from serve.speech.file_types import is_audio
from serve.speech.formats import output_paths, suffix_of

Format = Literal["jsonl", "parquet"]

_EXPECTED = "expected a folder of audio, or a manifest: JSONL with a `file` in each line"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Files with transcripts that are written to one file."""

    number: int
    files: tuple[str, ...]
    places: tuple[str, ...] = ()  # the output name of each file, without suffix


@dataclasses.dataclass(frozen=True)
class BulkOutput:
    """The folder and the formats of a run's output."""

    folder: str
    format: Format
    texts: tuple[formats.Format, ...] = ()  # formats of the file for each recording
    cues: CueOptions = DEFAULT  # layout of srt and vtt

    def transcripts(self, number: int) -> str:
        """Return the name of a shard's file of transcripts."""
        return f"{self.folder}/transcripts/{number:06d}.{self.format}"

    def text(self, place: str, format: formats.Format) -> str:
        """Return the name of a recording's transcript file; see `Shard.places`."""
        return f"{self.folder}/files/{place}{suffix_of(format)}"

    def failed(self, number: int) -> str:
        """Return the name of the file that lists a shard's failed files."""
        return f"{self.folder}/failed/{number:06d}.jsonl"

    def done(self) -> set[int]:
        """Return the numbers of the shards that are done."""
        names = store.names_in(f"{self.folder}/transcripts")
        matches = (re.fullmatch(rf"(\d{{6,}})\.{self.format}", name) for name in names)
        return {int(match[1]) for match in matches if match}

    def gather_failed(self) -> int:
        """Write `failed.jsonl` from the files of all shards; return how many lines it has."""
        parts = store.names_in(f"{self.folder}/failed")
        lines = b"".join(store.read(f"{self.folder}/failed/{name}") for name in parts)
        store.write(f"{self.folder}/failed.jsonl", lines)
        return lines.count(b"\n")


@dataclasses.dataclass(frozen=True)
class _BulkManifestLine:
    file: str


def find_files(name: str) -> tuple[list[str], int]:
    """Return the files of an input, and the number of files in a folder that are not audio.

    Args:
        name: a folder, or a manifest; its lines name files relative to the manifest.

    Raises:
        ConfigError: the input does not exist, or a line of the manifest is wrong.
    """
    kind = store.kind_of(name)
    if kind == fs.FileType.NotFound:
        raise ConfigError(f"{name} does not exist; {_EXPECTED}")
    if kind == fs.FileType.Directory:
        names = store.names_in(name)
        files = [file for file in names if is_audio(file)]
        others, folder = len(names) - len(files), name
    else:
        files, others, folder = _files_of_manifest(name), 0, store.parent(name)
    if not files:
        raise ConfigError(f"{name} has no audio; {_EXPECTED}")
    return [store.join(folder, file) for file in files], others


def _files_of_manifest(manifest: str) -> list[str]:
    """Read the names of files in a manifest, each once."""
    lines = store.read(manifest, _EXPECTED).split(b"\n")
    files = (
        from_json(
            _BulkManifestLine, line, f"{manifest}:{number}", advice=_EXPECTED, extra="ignore"
        ).file
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    return list(dict.fromkeys(files))


def shards_of(files: list[str], size: int, places: Sequence[str] = ()) -> list[Shard]:
    """Divide files, and their output names if there are any, into shards of `size` files."""
    parts = (slice(start, start + size) for start in range(0, len(files), size))
    return [Shard(i, tuple(files[part]), tuple(places[part])) for i, part in enumerate(parts)]


def places_below(files: list[str], name: str) -> list[str]:
    """Return the output name of each file: its path below the folder, else its whole name.

    Args:
        files: the files of `find_files`.
        name: the folder, or the manifest.
    """
    folder = name if store.kind_of(name) == fs.FileType.Directory else store.parent(name)
    return output_paths([_below(file, folder) for file in files])


def _below(file: str, folder: str) -> str:
    scheme, mark, path = file.rpartition("://")
    normalized = f"{scheme}{mark}{posixpath.normpath(path)}"
    if normalized.startswith(f"{folder.rstrip('/')}/"):
        return normalized[len(folder.rstrip("/")) + 1 :]
    return normalized.replace("://", "/").lstrip("/")


def digest_of(files: list[str]) -> str:
    """Return the SHA-256 of the names, to compare the inputs of two runs."""
    names = "".join(f"{file}\n" for file in files)
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()


def keep_or_compare(output: BulkOutput, settings: dict[str, Any]) -> None:
    """Write this run's settings to `run.json`, or compare them with those in it.

    Raises:
        ConfigError: the folder has a run with other settings.
    """
    name = f"{output.folder}/run.json"
    settings = json.loads(to_json(settings))
    if not store.exists(name):
        store.write(name, to_json(settings, indent=2).encode())
        return
    kept = from_json(dict[str, Any], store.read(name), name, advice="choose another --output")
    before, now = flat(kept), flat(settings)
    differences = "; ".join(
        f"{key} was {to_json(before.get(key))} and is now {to_json(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    )
    if differences:
        raise ConfigError(
            f"{output.folder} has a run with other settings: {differences}; choose another "
            "--output, or use the same settings"
        )
