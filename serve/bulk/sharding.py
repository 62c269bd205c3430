"""A run's work: its files in shards, and what is done of them.

A shard is so many files in the order of their names, or of the manifest; its number is its name. It
is done when its file of transcripts is there, which is written last and as a whole: whoever runs
the same again does what is missing. `run.json` keeps what the run was asked, so that another run
never mixes with it.

    OUTPUT/run.json
    OUTPUT/transcripts/000000.jsonl   or .parquet: a line or row for each file transcribed
    OUTPUT/files/talk.srt             a file for each, where formats such as srt are asked for
    OUTPUT/failed/000000.jsonl        `file` and `error` of the others, where there are any
    OUTPUT/failed.jsonl               all of them, at the end: a manifest of what to try again
    OUTPUT/tries/000000.json          of a shard that is done file by file, for its process ended:
                                      how often each file was in hand when it did
"""

import dataclasses
import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pyarrow import fs

from serve.bulk import store
from serve.contract.codec import from_json, to_json
from serve.contract.errors import ConfigError
from serve.speech import formats
from serve.speech.cues import DEFAULT, CueOptions
from serve.speech.file_types import is_audio
from serve.speech.formats import places_of, suffix_of

Format = Literal["jsonl", "parquet"]

_NEEDED = "expected a folder of audio, or a manifest: JSONL with `file` in each line"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Some of the files, whose transcripts go into one file."""

    number: int
    files: tuple[str, ...]
    places: tuple[str, ...] = ()  # of each the name of its own transcripts, without suffix


@dataclasses.dataclass(frozen=True)
class BulkOutput:
    """The folder and the formats that a run writes."""

    folder: str
    format: Format
    texts: tuple[formats.Format, ...] = ()  # formats of which each recording gets a file
    cues: CueOptions = DEFAULT  # of srt and vtt among these

    def transcripts(self, number: int) -> str:
        """Return the name of the file of a shard's transcripts."""
        return f"{self.folder}/transcripts/{number:06d}.{self.format}"

    def text(self, place: str, format: formats.Format) -> str:
        """Return the name of the file of one recording's transcript; see `Shard.places`."""
        return f"{self.folder}/files/{place}{suffix_of(format)}"

    def failed(self, number: int) -> str:
        """Return the name of the file that lists what failed in a shard."""
        return f"{self.folder}/failed/{number:06d}.jsonl"

    def done(self) -> set[int]:
        """Return the numbers of the shards that are done."""
        names = store.names_in(f"{self.folder}/transcripts")
        matches = (re.fullmatch(rf"(\d{{6,}})\.{self.format}", name) for name in names)
        return {int(match[1]) for match in matches if match}

    def tries(self, number: int) -> dict[str, int]:
        """Count how often files of a shard were in hand when their process ended."""
        name = self._tries(number)
        if not store.exists(name):
            return {}
        return from_json(dict[str, int], store.read(name), name, advice="delete it")

    def keep_tries(self, number: int, tries: dict[str, int]) -> None:
        """Write these counts; without any there is nothing to keep."""
        if tries:
            store.write(self._tries(number), to_json(tries).encode())
        else:
            store.delete(self._tries(number))

    def _tries(self, number: int) -> str:
        return f"{self.folder}/tries/{number:06d}.json"

    def gather_failed(self) -> int:
        """Write `failed.jsonl` from what the shards wrote; return how many files it names."""
        parts = store.names_in(f"{self.folder}/failed")
        lines = b"".join(store.read(f"{self.folder}/failed/{name}") for name in parts)
        store.write(f"{self.folder}/failed.jsonl", lines)
        return lines.count(b"\n")


@dataclasses.dataclass(frozen=True)
class _BulkManifestLine:
    file: str


def find_files(name: str) -> tuple[list[str], int]:
    """Find the files that an input names, and how many others a folder holds.

    Args:
        name: a folder, or a manifest, whose lines name files relative to it.

    Raises:
        ConfigError: there is none, a line of it is wrong, or a file stands in it twice.
    """
    kind = store.kind_of(name)
    if kind == fs.FileType.NotFound:
        raise ConfigError(f"there is no {name}; {_NEEDED}")
    if kind == fs.FileType.Directory:
        names = store.names_in(name)
        files = [file for file in names if is_audio(file)]
        others, folder = len(names) - len(files), name
    else:
        files, others, folder = _listed(name), 0, store.parent(name)
    if not files:
        raise ConfigError(f"{name} holds no audio; {_NEEDED}")
    return [store.join(folder, file) for file in files], others


def _listed(manifest: str) -> list[str]:
    """Read the files that a manifest names, each once."""
    try:
        lines = store.read(manifest, _NEEDED).decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{manifest} is not UTF-8; {_NEEDED}") from error
    files: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file = from_json(
            _BulkManifestLine, line, f"{manifest}:{number}", advice=_NEEDED, extra="ignore"
        ).file
        if file in files:
            raise ConfigError(f"{manifest}:{number}: {file} stands in line {files[file]}, too")
        files[file] = number
    return list(files)


def shards_of(files: list[str], size: int, places: Sequence[str] = ()) -> list[Shard]:
    """Divide files into shards of so many, with the places of those that have any."""
    parts = (slice(start, start + size) for start in range(0, len(files), size))
    return [Shard(i, tuple(files[part]), tuple(places[part])) for i, part in enumerate(parts)]


def places_below(files: list[str], name: str) -> list[str]:
    """Name each file's own transcripts: as it lies in the folder, else by its whole name.

    Args:
        files: what `find_files` found.
        name: of the folder, or of the manifest.
    """
    folder = name if store.kind_of(name) == fs.FileType.Directory else store.parent(name)
    return places_of([_below(file, folder) for file in files])


def _below(file: str, folder: str) -> str:
    scheme, mark, path = file.rpartition("://")
    whole = f"{scheme}{mark}{posixpath.normpath(path)}"
    if whole.startswith(f"{folder.rstrip('/')}/"):
        return whole[len(folder.rstrip("/")) + 1 :]
    return whole.replace("://", "/").lstrip("/")


def digest_of(files: list[str]) -> str:
    """Return the SHA-256 of the names, which tells whether an input is the same."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def keep_or_compare(output: BulkOutput, settings: dict[str, Any]) -> None:
    """Keep this run's settings, or compare them with what is kept.

    Raises:
        ConfigError: the folder holds a run that was asked something else.
    """
    name = f"{output.folder}/run.json"
    settings = json.loads(to_json(settings))
    if not store.exists(name):
        if output.done():
            raise ConfigError(f"{output.folder} has transcripts and no run.json; name another")
        store.write(name, to_json(settings, indent=2).encode())
        return
    kept = from_json(dict[str, Any], store.read(name), name, advice="name another --output")
    differences = "; ".join(_differences(kept, settings))
    if differences:
        raise ConfigError(
            f"{output.folder} holds another run: {differences}; name another --output, or ask the "
            "same"
        )


def _differences(kept: dict[str, Any], settings: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the settings in which two runs differ, each key by its full name."""
    for key in sorted(settings.keys() | kept.keys()):
        before, now = kept.get(key), settings.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now, f"{above}{key}.")
        elif before != now:
            yield f"{above}{key} was {to_json(before)} and is now {to_json(now)}"
