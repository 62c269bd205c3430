"""The truth of a recording, second by second, and the manifest that tells it.

A manifest of recordings is one of `build.clips`, so that any system can be given them, with a few
keys more: `kind`, `seed` and `stretches`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from build.clips import Clip
from eval.record import read_jsonl

Kind = Literal["pauses", "noise", "tones", "languages", "reading", "passage"]
"""The difficulty of a recording. All but the last two have pauses of up to 8 s."""

KINDS: dict[Kind, str] = {
    "pauses": "one language, a quiet room, breaks of up to a minute",
    "noise": "one language, half of it under noise of 10 to 25 dB less, and noise alone",
    "tones": "one language, and between its sentences chords and melodies of 5 to 30 s",
    "languages": "changes its language every minute or so; breaks, noise and tones",
    "reading": "one speaker, sentence after sentence, with pauses of 0.1 to 1.5 s",
    "passage": "a recording as somebody made it",
}

What = Literal["speech", "silence", "noise", "tones"]
UNSPOKEN: tuple[What, ...] = ("silence", "noise", "tones")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some seconds of a recording; stretches follow each other without a gap."""

    what: What  # noise and tones are alone; speech is one sentence
    start_s: float
    end_s: float
    text: str = ""  # of speech
    language: str | None = None  # code, of speech
    snr_db: float | None = None  # speech or a pause under noise: how much less the noise is


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording and all that is in it."""

    file: str  # relative to the manifest
    kind: Kind
    seed: int
    duration: float  # s
    stretches: tuple[Stretch, ...]
    text: str  # of all sentences
    language: str  # of the first sentence

    @property
    def sentences(self) -> tuple[Stretch, ...]:
        """Return the sentences, in order."""
        return tuple(stretch for stretch in self.stretches if stretch.what == "speech")

    def clip(self, folder: Path) -> Clip:
        """Return the recording, as systems are given it."""
        return Clip(self.file, folder / self.file, self.text, self.language, self.duration)


def recording(file: str, kind: Kind, seed: int, stretches: Sequence[Stretch]) -> Recording:
    """Make a recording of these stretches, at least one of them a sentence."""
    sentences = [stretch for stretch in stretches if stretch.what == "speech"]
    assert sentences[0].language is not None
    return Recording(
        file=file,
        kind=kind,
        seed=seed,
        duration=stretches[-1].end_s,
        stretches=tuple(stretches),
        text=" ".join(sentence.text for sentence in sentences),
        language=sentences[0].language,
    )


def read_manifest(path: Path) -> list[Recording]:
    """Read a manifest of recordings.

    Raises:
        FileError: it cannot be read.
        ConfigError: a line is not a recording; the message names the line.
    """
    return read_jsonl(path, Recording, "expected a manifest of recordings")
