"""Scripts of recordings: sentences, pauses, noise and tones, drawn by a seed. No sound yet.

A script is a row of scenes. In a scene a few sentences of one language follow each other; between
two scenes there is a break: some quiet seconds, or what the recording's kind is about. A sentence
that was said comes again only after half of the others were, so what is heard twice in a row was
repeated by the listener.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from eval.long.truth import Kind, Stretch, What

PAUSE_S = (0.3, 8.0)  # between two sentences
READING_PAUSE_S = (0.1, 1.5)
SCENE = (6, 16)  # sentences
BREAK_S: dict[What, tuple[float, float]] = {
    "silence": (20.0, 60.0),
    "noise": (5.0, 20.0),
    "tones": (5.0, 30.0),
}
AROUND_S = (0.4, 2.5)  # quiet, before a break and after it
SNR_DB = (10.0, 25.0)
LANGUAGE_S = 45.0  # after which the language changes with the next scene

# Of the breaks and scenes of a kind: how many are what.
_BREAKS: dict[Kind, dict[What, float]] = {
    "pauses": {"silence": 1.0},
    "noise": {"silence": 0.3, "noise": 0.7},
    "tones": {"silence": 0.2, "tones": 0.8},
    "languages": {"silence": 0.4, "noise": 0.3, "tones": 0.3},
}
_UNDER_NOISE: dict[Kind, float] = {"noise": 0.5, "languages": 0.3}


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence that somebody has spoken: where its sound is, and what it says."""

    file: str
    start_s: float  # in the file
    end_s: float
    text: str
    language: str
    speaker: str = ""  # with the group; "" = unknown


@dataclasses.dataclass(frozen=True)
class Event:
    """A stretch of a script, and the sentence that is its sound if it is speech."""

    stretch: Stretch
    sentence: Sentence | None = None


class Deck:
    """Sentences of one language, drawn so that none comes back soon.

    Args:
        sentences: all there are; of some several recordings may be there.
    """

    def __init__(self, sentences: Sequence[Sentence]) -> None:
        by_text: dict[str, list[Sentence]] = {}
        for sentence in sentences:
            by_text.setdefault(sentence.text, []).append(sentence)
        self._waiting = list(by_text.values())  # whose turn was longest ago is first

    def draw(self, rng: np.random.Generator) -> Sentence:
        """Draw any of the half that was not said for longest."""
        spoken = self._waiting.pop(int(rng.integers(math.ceil(len(self._waiting) / 2))))
        self._waiting.append(spoken)
        return spoken[int(rng.integers(len(spoken)))]


def write_script(
    kind: Kind, languages: Sequence[str], decks: Mapping[str, Deck], seconds: float, seed: int
) -> list[Event]:
    """Draw what happens in a recording.

    Args:
        kind: what it is about.
        languages: codes; with more than one they take turns.
        decks: the sentences of each; they remember what was drawn.
        seconds: how long it is to be; it ends after the scene that reaches them.
        seed: decides everything else, together with what was drawn before.
    """
    script = _Script(kind, decks, np.random.default_rng(seed))
    turn, changed_s = 0, 0.0
    script.quiet(AROUND_S)
    while True:
        script.scene(languages[turn % len(languages)])
        if script.end_s >= seconds:
            script.quiet(AROUND_S)
            return script.events
        if script.end_s - changed_s >= LANGUAGE_S:
            turn, changed_s = turn + 1, script.end_s
        script.pause()


class _Script:
    """A script as far as it is written."""

    def __init__(self, kind: Kind, decks: Mapping[str, Deck], rng: np.random.Generator) -> None:
        self._kind = kind
        self._decks = decks
        self._rng = rng
        self.events: list[Event] = []
        self.end_s = 0.0

    def scene(self, language: str) -> None:
        """Add some sentences with pauses between them, perhaps under noise."""
        under_noise = self._rng.random() < _UNDER_NOISE.get(self._kind, 0.0)
        snr_db = round(float(self._rng.uniform(*SNR_DB)), 1) if under_noise else None
        for number in range(int(self._rng.integers(*SCENE, endpoint=True))):
            if number:
                low, high = READING_PAUSE_S if self._kind == "reading" else PAUSE_S
                share = float(self._rng.random()) ** 2  # most are short
                self._add("silence", low * (high / low) ** share, snr_db)
            sentence = self._decks[language].draw(self._rng)
            start_s, self.end_s = self.end_s, self.end_s + sentence.end_s - sentence.start_s
            spoken = Stretch("speech", start_s, self.end_s, sentence.text, language, snr_db)
            self.events.append(Event(spoken, sentence))

    def pause(self) -> None:
        """Add a break between two scenes; a reading has none."""
        if self._kind == "reading":
            self.quiet(READING_PAUSE_S)
            return
        chances = _BREAKS[self._kind]
        what = self._rng.choice(list(chances), p=list(chances.values()))
        self.quiet(AROUND_S)
        self._add(what, float(self._rng.uniform(*BREAK_S[what])))
        self.quiet(AROUND_S)

    def quiet(self, seconds: tuple[float, float]) -> None:
        """Add nothing but the room."""
        self._add("silence", float(self._rng.uniform(*seconds)))

    def _add(self, what: What, seconds: float, snr_db: float | None = None) -> None:
        start_s, self.end_s = self.end_s, self.end_s + seconds
        what = "noise" if snr_db is not None else what  # what one hears in a pause under noise
        self.events.append(Event(Stretch(what, start_s, self.end_s, snr_db=snr_db)))
