"""A folder of audio of which nobody has written what is said."""

from collections.abc import Iterator
from pathlib import Path

from eval.corpora.layout import Entry, Layout
from serve.speech.kinds import is_audio


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
