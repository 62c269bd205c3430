"""Layouts of recordings as people have them: tables, LibriSpeech, text files beside the audio.

A table is a CSV with any usual delimiter, or JSONL. So is a TSV of Common Voice, with its audio in
clips/ beside it.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from build.clips import Clip, load_clips
from serve.contract.codec import from_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.speech.file_types import is_audio

KEYS = {
    "audio": ("file_name", "file", "path", "audio", "audio_filepath", "audio_path", "filename"),
    "text": ("text", "sentence", "transcript", "transcription", "reference"),
    "language": ("language", "lang", "locale"),
}
EXPECTED = (
    "expected audio files with a .txt beside each, a CSV, TSV or JSONL table or a folder with one, "
    "a manifest, or LibriSpeech's folder"
)
UNDERSTOOD = (
    f"audio as {', '.join(KEYS['audio'])}; text as {', '.join(KEYS['text'])}; "
    f"language, if it is there, as {', '.join(KEYS['language'])}"
)
TRANSCRIPTS = "*.trans.txt"  # of LibriSpeech
CLIPS = "clips"  # the folder of audio of Common Voice
DELIMITERS = ",\t;|"
_EXPECTED_LINE = "expected an object a line"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The recordings of one place.

    Attributes:
        title: names the layout in reports.
        clips: every recording, in a fixed order, by the line that lists it. A duration of 0 is
            not known yet.
        references: whether the clips have texts.
        may_be_silent: whether an empty text means no speech; else the text is missing.
    """

    title: str
    clips: Sequence[tuple[str, Clip]]
    references: bool = True
    may_be_silent: bool = False


# ---------------------------------------------------------------- folders


def librispeech(folder: Path) -> Layout:
    """Read LibriSpeech: the whole, a part such as test-clean, a speaker or a chapter.

    Raises:
        ConfigError: a line is malformed; the message names it.
        FileError: a file cannot be read.
    """
    clips = []
    for transcripts in sorted(folder.rglob(TRANSCRIPTS)):
        lines = read_text(transcripts, "expected transcripts of LibriSpeech").splitlines()
        for number, line in enumerate(lines, 1):
            name, _, text = line.strip().partition(" ")
            where = f"{transcripts.relative_to(folder)}:{number}"
            if not name:
                continue
            if Path(name).name != name:
                raise ConfigError(f"{where}: {name!r} is not the id of an utterance")
            audio = transcripts.parent / f"{name}.flac"
            file = audio.relative_to(folder).as_posix()
            clips.append((where, Clip(file, audio, text.strip(), "en", 0.0)))
    return Layout("LibriSpeech's layout, transcripts in *.trans.txt", clips)


def recordings(folder: Path) -> Layout:
    """List the audio files in a folder and below it, each with its .txt file's text if any has one.

    Raises:
        FileError: a text cannot be read.
    """
    files = sorted(folder.rglob("*"))
    audio = [path for path in files if is_audio(path.name)]
    texts = {path for path in files if path.suffix == ".txt"}
    without_audio = texts - {path.with_suffix(".txt") for path in audio}
    references = texts != without_audio
    clips = []
    # A text without audio is listed, so that it is refused by name.
    for path in [*audio, *sorted(without_audio)] if references else audio:
        text, spoken = path.with_suffix(".txt"), ""
        if references and text in texts:
            spoken = " ".join(read_text(text, "expected the text of a recording").split())
        file, where = (one.relative_to(folder).as_posix() for one in (path, text))
        place = folder if path in without_audio else path
        clips.append((where if references else file, Clip(file, place, spoken, None, 0.0)))
    title = "audio with a .txt beside each file" if references else "audio without references"
    return Layout(title, clips, references)


# ---------------------------------------------------------------- tables


def table(path: Path) -> Layout:
    """Read a file with references: the manifest of a corpus, or any table.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the column for audio or for text is missing, or a line is malformed.
    """
    rows = list(_rows(path))
    names = list(rows[0][1]) if rows else []
    if _is_jsonl(path) and {"file", "text", "language", "duration"} <= set(names):
        clips = [(clip.file, clip) for clip in load_clips(path)]
        return Layout("a manifest of clips", clips, may_be_silent=True)
    columns = _columns(names)
    if not {"audio", "text"} <= columns.keys():
        raise ConfigError(f"{path} has {', '.join(names) or 'no lines'}; expected {UNDERSTOOD}")
    folder, title = path.parent, f"the table {path.name}"
    if path.suffix == ".tsv" and (path.parent / CLIPS).is_dir():
        folder, title = path.parent / CLIPS, f"Common Voice's {path.name}"
    clips = []
    for number, row in rows:
        cells = {what: row.get(name) or "" for what, name in columns.items()}
        for what, value in cells.items():
            if not isinstance(value, str):
                position = f"{path.name}:{number}: `{columns[what]}`"
                raise ConfigError(f"{position} is {value!r}; expected text")
        file, text = cells["audio"].strip(), cells["text"].strip()
        # A tag such as zh-CN; Whisper knows the language alone.
        tag = cells.get("language", "").strip().replace("_", "-")
        language = tag.partition("-")[0].casefold() or None
        clip = Clip(file, folder / file, text, language, 0.0)
        clips.append((f"{path.name}:{number}", clip))
    sources = ", ".join(f"{what} from `{name}`" for what, name in columns.items())
    return Layout(f"{title}, {sources}", clips)


def _columns(names: Sequence[str]) -> dict[str, str]:
    """Return a table's own names of `KEYS`; the first that fits is taken, and case is ignored."""
    known = {name.strip().casefold(): name for name in reversed(names)}
    fitting = {what: [known[key] for key in keys if key in known] for what, keys in KEYS.items()}
    return {what: found[0] for what, found in fitting.items() if found}


def _is_jsonl(path: Path) -> bool:
    return path.suffix.casefold() in (".jsonl", ".json", ".ndjson")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the cells of each row."""
    text = read_text(path, "expected a table of references").removeprefix("\ufeff")
    if _is_jsonl(path):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                position = f"{path}:{number}"
                yield number, from_json(dict[str, Any], line, position, advice=_EXPECTED_LINE)
        return
    header = io.StringIO(text, newline="").readline()
    delimiter = max(DELIMITERS, key=header.count)
    # Tables with tabs, such as Common Voice's, have texts with unpaired quotes.
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    try:
        for row in reader:
            cells = {name: value for name, value in row.items() if name}
            if delimiter == "\t":
                cells = {name: _unquoted((value or "").strip()) for name, value in cells.items()}
            yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: {error}") from error


def _unquoted(cell: str) -> str:
    """Remove the quotes that a CSV writer put around a cell."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        return cell[1:-1].replace('""', '"')
    return cell
