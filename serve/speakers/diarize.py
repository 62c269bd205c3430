"""Samples -> who speaks when.

One network tells who of at most three speakers is active in each window of 10 s, another makes a
vector of the voice in each piece of their speech. Vectors of the whole recording are clustered to
voices; a piece is said by the voice that it is most like.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
import torch

from serve.contract.errors import RequestError, shown
from serve.contract.messages import Samples
from serve.speakers.clusters import Rules, Vectors, assign, centroids
from serve.speakers.hearing import Ear, Heard, Listening
from serve.speakers.timeline import Smoothing, turns
from serve.speech.rate import SAMPLE_RATE

REFERENCE_S = (2.0, 10.0)  # a known speaker's reference lasts so long
_VOICE_S = 1.0  # and holds so much speech at least


@dataclasses.dataclass(frozen=True)
class Turn:
    """A stretch of speech of one speaker; those of several may overlap."""

    start_s: float
    end_s: float
    speaker: str  # a known speaker's name, else A, B, … in order of their first words


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A speaker who has a name, and a recording of nobody else."""

    name: str
    samples: Samples  # (n,) at 16 kHz, of REFERENCE_S seconds


@dataclasses.dataclass(frozen=True)
class Settings:
    """Chosen by measurement, see `python -m eval speakers`."""

    listening: Listening = dataclasses.field(default_factory=Listening)
    rules: Rules = dataclasses.field(default_factory=Rules)
    smoothing: Smoothing = dataclasses.field(default_factory=Smoothing)
    sure_s: float = 1.0  # voices are found by vectors of so much speech, if there are any
    named: float = 0.5  # cosine from which on a voice is a known speaker's


def open_diarizer(device: str) -> "Diarizer":
    """Load both networks onto a device, such as "cpu" or "cuda:0"."""
    return Diarizer(device)


class Diarizer:
    """Tells who speaks when; any number of threads may ask it.

    Args:
        device: where the networks compute.
        settings: chosen by measurement.
    """

    def __init__(self, device: str, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._ear = Ear(torch.device(device), self._settings.listening)

    def diarize(
        self,
        samples: Samples | Iterable[Samples],
        *,
        num_speakers: int | None = None,
        min_speakers: int | None = None,
        max_speakers: int | None = None,
        known: Sequence[Known] = (),
    ) -> tuple[Turn, ...]:
        """Tell who speaks when.

        Args:
            samples: float32 (n,) in [-1, 1] at 16 kHz mono, or blocks of them.
            num_speakers: how many there are, where that is known.
            min_speakers: there are at least so many, as far as so many can be told apart.
            max_speakers: there are at most so many.
            known: speakers who are called by their name.

        Returns:
            Turns in order of time; () where nobody speaks.

        Raises:
            RequestError: the numbers contradict each other, or a reference holds no voice or two.
        """
        least, most = _bounds(num_speakers, min_speakers, max_speakers)
        references = [self._reference(speaker) for speaker in known]
        pieces = self._ear.hear([samples] if isinstance(samples, np.ndarray) else samples)
        if not len(pieces.vectors):
            return ()
        voices = self._voices(pieces, least, most)
        labels = assign(pieces.vectors @ voices.T, list(_at_once(pieces)))
        spoken = turns(pieces, labels, self._settings.smoothing)
        named = _named(voices, references, self._settings.named)
        names = {voice: known[index].name for voice, index in named.items()}
        free = letters(set(names.values()))
        for _, _, voice in spoken:
            if voice not in names:
                names[voice] = next(free)
        return tuple(Turn(start_s, end_s, names[voice]) for start_s, end_s, voice in spoken)

    def _voices(self, pieces: Heard, least: int, most: int) -> Vectors:
        """Find the voices of a recording, (voices, size)."""
        sure = pieces.speech_s >= self._settings.sure_s
        if sure.sum() < least:
            sure[:] = True
        vectors, speech_s = pieces.vectors[sure], pieces.speech_s[sure]
        return centroids(vectors, speech_s, least, most, self._settings.rules)

    def _reference(self, known: Known) -> Vectors:
        """Make the vector of a known speaker's voice, (size,)."""
        seconds, (shortest_s, longest_s) = len(known.samples) / SAMPLE_RATE, REFERENCE_S
        subject = f"the reference of {shown(known.name)}"
        if not shortest_s <= seconds <= longest_s:
            raise RequestError(
                f"{subject} lasts {seconds:.1f} s; expected {shortest_s:g} to {longest_s:g} s"
            )
        pieces = self._ear.hear([known.samples])
        if pieces.speech_s.sum() < _VOICE_S:
            raise RequestError(f"{subject} holds no voice; expected a second of speech at least")
        rules = dataclasses.replace(self._settings.rules, least_s=_VOICE_S)
        voices = centroids(pieces.vectors, pieces.speech_s, 1, 2, rules)
        if len(voices) > 1:
            raise RequestError(f"{subject} holds two voices; expected one person's alone")
        return np.asarray(voices[0])


def _bounds(num: int | None, least: int | None, most: int | None) -> tuple[int, int]:
    """Bound the number of speakers, at least and at most.

    Raises:
        RequestError: no number fits.
    """
    bounds = {"num_speakers": num, "min_speakers": least, "max_speakers": most}
    for name, value in bounds.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}; expected 1 or more")
    low, high = num or least or 1, num or most or _MOST
    if low > high or low < (least or 1) or high > (most or _MOST):
        given = ", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None)
        raise RequestError(f"no number of speakers fits {given}")
    return low, high


_MOST = 1_000_000  # speakers: no bound


def _at_once(pieces: Heard) -> Iterator[tuple[int, int]]:
    """Yield pairs of pieces in which two speakers of a window are active at once."""
    spans = sorted(
        (start, end, index) for index, piece in enumerate(pieces.spans) for start, end in piece
    )
    for number, (_, end, index) in enumerate(spans):
        for start, _, other in itertools.islice(spans, number + 1, None):
            if start >= end:
                break
            if other != index:
                yield index, other


def _named(voices: Vectors, references: Sequence[Vectors], threshold: float) -> dict[int, int]:
    """Find the index of the known speaker of each voice: the nearest, where it is near enough."""
    named = dict[int, int]()
    if not references:
        return named
    likeness = voices @ np.stack(references).T
    while likeness.max() >= threshold:
        voice, index = map(int, np.unravel_index(likeness.argmax(), likeness.shape))
        named[voice] = index
        likeness[voice], likeness[:, index] = -np.inf, -np.inf
    return named


def letters(taken: Container[str]) -> Iterator[str]:
    """Yield A to Z, AA, AB, …, except for names that are taken."""
    alphabet = [chr(ord("A") + i) for i in range(26)]
    for length in itertools.count(1):
        for name in map("".join, itertools.product(alphabet, repeat=length)):
            if name not in taken:
                yield name
