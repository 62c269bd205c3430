"""Diarize recordings.

A segmentation network finds the activity of up to three speakers in each window of 10 s. An
embedding network computes a vector for each piece of a speaker's speech. The vectors of the whole
recording are clustered to voices, and each piece is assigned to the most similar voice.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
import torch

from serve.contract.errors import RequestError, shown
from serve.contract.messages import Samples
from serve.speakers.clusters import ClusteringSettings, Labels, Vectors, assign, centroids
from serve.speakers.inference import DiarizationModels, InferenceSettings, SpeakerEmbeddings
from serve.speakers.segmentation import HOP, OFFSET
from serve.speech.rate import SAMPLE_RATE

REFERENCE_S = (2.0, 10.0)  # minimum and maximum seconds of a known speaker's reference
_VOICE_S = 1.0  # minimum seconds of speech in a reference


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """The thresholds of turns, tuned with `python -m eval speakers`."""

    early_s: float = 0.045  # start a turn earlier by this much, because the network is late
    gap_s: float = 0.2  # fill shorter pauses of a speaker
    turn_s: float = 0.15  # drop shorter turns


def turns(
    pieces: SpeakerEmbeddings, labels: Labels, smoothing: Smoothing
) -> list[tuple[float, float, int]]:
    """Join pieces of speech to turns.

    Args:
        pieces: the m pieces of speech.
        labels: (m,), the voice of each piece.
        smoothing: the thresholds of turns.

    Returns:
        Start and end in seconds and the voice of each turn, in order of time.
    """
    joined = dict[int, list[tuple[float, float]]]()
    for start, end, voice in sorted(
        (start, end, int(voice))
        for spans, voice in zip(pieces.spans, labels, strict=True)
        for start, end in spans
    ):
        start_s, end_s = ((OFFSET + HOP * frame) / SAMPLE_RATE for frame in (start, end))
        start_s = max(0.0, start_s - smoothing.early_s)
        own = joined.setdefault(voice, [])
        if own and start_s - own[-1][1] < smoothing.gap_s:
            start_s, end_s = own[-1][0], max(end_s, own.pop()[1])
        own.append((start_s, min(end_s, pieces.seconds)))
    return sorted(
        (start_s, end_s, voice)
        for voice, own in joined.items()
        for start_s, end_s in own
        if end_s - start_s >= smoothing.turn_s
    )


@dataclasses.dataclass(frozen=True)
class SpeakerTurn:
    """An interval of speech of one speaker; turns of different speakers may overlap."""

    start_s: float
    end_s: float
    speaker: str  # a known speaker's name, else A, B, … in order of first words


@dataclasses.dataclass(frozen=True, eq=False)
class KnownSpeaker:
    """A speaker with a name and a reference recording."""

    name: str
    samples: Samples  # (n,) at 16 kHz, with a length within REFERENCE_S


@dataclasses.dataclass(frozen=True)
class DiarizationSettings:
    """The settings of diarization, tuned with `python -m eval speakers`."""

    listening: InferenceSettings = dataclasses.field(default_factory=InferenceSettings)
    rules: ClusteringSettings = dataclasses.field(default_factory=ClusteringSettings)
    smoothing: Smoothing = dataclasses.field(default_factory=Smoothing)
    sure_s: float = 1.0  # minimum speech of vectors that are clustered, if there are enough
    named: float = 0.5  # minimum cosine similarity of a voice to a known speaker


class Diarizer:
    """A diarizer of recordings, which loads its networks. Thread-safe.

    Args:
        device: the networks' device, such as "cpu" or "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self._settings = DiarizationSettings()
        self._models = DiarizationModels(torch.device(device), self._settings.listening)

    def diarize(
        self,
        samples: Samples | Iterable[Samples],
        *,
        num_speakers: int | None = None,
        min_speakers: int | None = None,
        max_speakers: int | None = None,
        known: Sequence[KnownSpeaker] = (),
    ) -> tuple[SpeakerTurn, ...]:
        """Find the speaker turns of a recording.

        Args:
            samples: float32 (n,) in [-1, 1] at 16 kHz mono, or blocks of them.
            num_speakers: the exact number of speakers; None: unknown.
            min_speakers: the minimum number; fewer are returned if too few voices are found.
            max_speakers: the maximum number of speakers.
            known: speakers to identify by name.

        Returns:
            Turns in order of time; () if there is no speech.

        Raises:
            RequestError: the numbers contradict each other, or a reference does not have exactly
                one voice.
        """
        least, most = _bounds(num_speakers, min_speakers, max_speakers)
        references = [self._reference(speaker) for speaker in known]
        pieces = self._models.hear([samples] if isinstance(samples, np.ndarray) else samples)
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
        return tuple(SpeakerTurn(start_s, end_s, names[voice]) for start_s, end_s, voice in spoken)

    def _voices(self, pieces: SpeakerEmbeddings, least: int, most: int) -> Vectors:
        """Return the voices of a recording, (voices, size)."""
        sure = pieces.speech_s >= self._settings.sure_s
        if sure.sum() < least:
            sure[:] = True
        vectors, speech_s = pieces.vectors[sure], pieces.speech_s[sure]
        return centroids(vectors, speech_s, least, most, self._settings.rules)

    def _reference(self, known: KnownSpeaker) -> Vectors:
        """Return the vector of a known speaker's voice, (size,)."""
        seconds, (shortest_s, longest_s) = len(known.samples) / SAMPLE_RATE, REFERENCE_S
        subject = f"the reference of {shown(known.name)}"
        if not shortest_s <= seconds <= longest_s:
            raise RequestError(
                f"{subject} lasts {seconds:.1f} s; expected {shortest_s:g} to {longest_s:g} s"
            )
        pieces = self._models.hear([known.samples])
        if pieces.speech_s.sum() < _VOICE_S:
            raise RequestError(f"{subject} has no speech; expected at least {_VOICE_S:g} s of it")
        rules = dataclasses.replace(self._settings.rules, least_s=_VOICE_S)
        voices = centroids(pieces.vectors, pieces.speech_s, 1, 2, rules)
        if len(voices) > 1:
            raise RequestError(f"{subject} has two voices; expected a single speaker")
        return np.asarray(voices[0])


def _bounds(num: int | None, least: int | None, most: int | None) -> tuple[int, int]:
    """Return the minimum and maximum number of speakers.

    Raises:
        RequestError: the numbers contradict each other.
    """
    bounds = {"num_speakers": num, "min_speakers": least, "max_speakers": most}
    for name, value in bounds.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}; expected 1 or more")
    low, high = num or least or 1, num or most or _MOST
    if low > high or low < (least or 1) or high > (most or _MOST):
        given = ", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None)
        raise RequestError(
            f"{given} contradict each other; expected min_speakers <= num_speakers <= max_speakers"
        )
    return low, high


_MOST = 1_000_000  # speakers: no limit


def _at_once(pieces: SpeakerEmbeddings) -> Iterator[tuple[int, int]]:
    """Yield pairs of pieces that overlap in time, so that their speakers differ."""
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
    """Map voices to indices of known speakers, most similar pairs first, above a threshold."""
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
    """Yield A to Z, AA, AB, …, without the names in `taken`."""
    alphabet = [chr(ord("A") + i) for i in range(26)]
    for length in itertools.count(1):
        for name in map("".join, itertools.product(alphabet, repeat=length)):
            if name not in taken:
                yield name
