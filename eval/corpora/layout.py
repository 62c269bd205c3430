"""Layouts of recordings as people have them."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from serve.contract.errors import ConfigError
from serve.contract.files import read_text
from serve.speech.kinds import is_audio

AUDIO_KEYS = ("file_name", "file", "path", "audio", "audio_filepath", "audio_path", "filename")
TEXT_KEYS = ("text", "sentence", "transcript", "transcription", "reference")
LANGUAGE_KEYS = ("language", "lang", "locale")
EXPECTED = (
    "expected a manifest, a folder with references in one CSV or JSONL file, LibriSpeech's or "
    "Common Voice's folder, Parquet files, or a data set of the Hugging Face hub as hf:OWNER/NAME"
)
UNDERSTOOD = (
    f"audio as {', '.join(AUDIO_KEYS)}; text as {', '.join(TEXT_KEYS)}; "
    f"language, if it is there, as {', '.join(LANGUAGE_KEYS)}"
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One recording and what is said in it, as its layout lists it."""

    file: str  # names it in reports; no two of a layout are the same
    audio: Path  # where the audio lies, or will lie once `Layout.fetch` has run
    text: str
    language: str | None  # None where the layout does not say
    where: str  # the line that lists it, for error texts
    duration_s: float | None = None  # where the layout says it
    group: str = ""  # as in `build.clips.Clip`
    speaker: str = ""
    half: str = ""


class Layout:
    """Recordings in one layout. Making one reads only what decides that this is the layout."""

    title: str  # what it is, for people
    references = True  # whether it says what is said

    def entries(self) -> Iterator[Entry]:
        """Yield every recording, in a fixed order, read one after another.

        Raises:
            ConfigError: a line is malformed; the message names it.
            FileError: a file cannot be read.
        """
        raise NotImplementedError

    def has_audio(self, entry: Entry) -> bool:
        """Return whether there is audio for an entry."""
        return entry.audio.is_file()

    def may_be_silent(self) -> bool:
        """Return whether an empty text says that nobody speaks; else the reference is missing."""
        return False

    def fetch(self, chosen: Sequence[Entry]) -> None:
        """Put the audio of these where `Entry.audio` says; most layouts have it there."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which keys of a table hold what."""

    audio: str
    text: str
    language: str | None

    def __str__(self) -> str:
        language = f", language from `{self.language}`" if self.language else ""
        return f"audio from `{self.audio}`, text from `{self.text}`{language}"


def columns_of(names: Sequence[str]) -> Columns | None:
    """Find the columns of a table with these keys; None where audio or text is not among them.

    Of several keys for the same the first of `AUDIO_KEYS`, and so on, is taken; case is ignored.
    """
    known = {name.strip().casefold(): name for name in reversed(names)}

    def first(keys: Sequence[str]) -> str | None:
        return next((known[key] for key in keys if key in known), None)

    audio, text = first(AUDIO_KEYS), first(TEXT_KEYS)
    if audio is None or text is None:
        return None
    return Columns(audio, text, first(LANGUAGE_KEYS))


def language_code(tag: str | None) -> str | None:
    """Return the language of a tag such as zh-CN, as Whisper writes it; None for an empty tag."""
    return (tag or "").strip().replace("_", "-").partition("-")[0].casefold() or None


# ---------------------------------------------------------------- librispeech


TRANSCRIPTS = "*.trans.txt"


class LibriSpeech(Layout):
    """A folder of LibriSpeech: the whole, a part such as test-clean, a speaker or a chapter."""

    title = "LibriSpeech's layout, transcripts in *.trans.txt"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[Entry]:
        """Do as `Layout.entries` says; a chapter's transcripts are read when it is its turn."""
        for transcripts in sorted(self._folder.rglob(TRANSCRIPTS)):
            lines = read_text(transcripts, "expected transcripts of LibriSpeech").splitlines()
            for number, line in enumerate(lines, 1):
                name, _, text = line.strip().partition(" ")
                where = f"{transcripts.relative_to(self._folder)}:{number}"
                if not name:
                    continue
                if Path(name).name != name:
                    raise ConfigError(f"{where}: {name!r} is not the id of an utterance")
                audio = transcripts.parent / f"{name}.flac"
                file = audio.relative_to(self._folder).as_posix()
                yield Entry(file, audio, text.strip(), "en", where)


# ---------------------------------------------------------------- recordings


class Recordings(Layout):
    """The audio files in a folder and below it, without texts."""

    title = "audio without references"
    references = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[Entry]:
        """Do as `Layout.entries` says."""
        for audio in sorted(self._folder.rglob("*")):
            if is_audio(audio.name):
                file = audio.relative_to(self._folder).as_posix()
                yield Entry(file, audio, "", None, file)
