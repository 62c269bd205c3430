"""LibriSpeech as its archives unpack: speaker/chapter/SPEAKER-CHAPTER.trans.txt beside FLACs."""

from collections.abc import Iterator
from pathlib import Path

from eval.corpora.layout import Entry, Layout
from serve.contract.errors import ConfigError
from serve.contract.files import read_text

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
