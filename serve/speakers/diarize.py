"""Diarize recordings.

A segmentation network finds the activity of up to three speakers in each window of 10 s. An
embedding network computes a vector for each piece of a speaker's speech. The vectors of the whole
recording are clustered to voices, and each piece is assigned to the most similar voice.

Clustering is agglomerative. The similarity of two clusters is the average cosine between their
vectors, weighted by the speech behind each. That average is a product of two sums, so no matrix of
all pairs is needed.
"""

import dataclasses
import itertools
import string
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from serve.contract.errors import RequestError, shown
from serve.contract.messages import Samples
from serve.speakers.inference import DiarizationModels, SpeakerEmbeddings, Vectors, unit
from serve.speakers.networks import HOP, OFFSET
from serve.speech.rate import SAMPLE_RATE

Labels = npt.NDArray[np.int64]
T = TypeVar("T", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class ClusteringSettings:
    """The thresholds that define a voice, tuned with `python -m eval speakers`.

    A cluster is a voice if it has `min_voice_s` seconds or `min_voice_share` of all speech. A
    smaller cluster is a voice if it has `min_distinct_s` seconds and is unlike every other voice.
    The speech of the remaining clusters is assigned to the most similar voice.
    """

    min_cosine: float = 0.42  # minimum average cosine of clusters to merge
    min_voice_s: float = 4.0
    min_voice_share: float = 0.1
    min_distinct_s: float = 1.2
    max_distinct_cosine: float = 0.3  # maximum cosine of a small voice to every other voice
    min_share: float = 0.01  # minimum share of any voice; noise adds up over hours


@dataclasses.dataclass(frozen=True)
class _ClusterMerge:
    """A merge of two clusters, each identified by the index of one vector."""

    cosine: float
    target: int
    source: int


def centroids(
    vectors: Vectors,
    seconds: npt.NDArray[np.float32],
    min_voices: int,
    max_voices: int,
    settings: ClusteringSettings,
) -> Vectors:
    """Find the voices of a recording.

    Args:
        vectors: (n, size), unit vectors, n > 0.
        seconds: (n,), seconds of speech behind each vector.
        min_voices: >= 1; fewer vectors give fewer voices.
        max_voices: >= min_voices.
        settings: the thresholds that define a voice.

    Returns:
        (voices, size), unit vectors.
    """
    merges = _merges(vectors, seconds)
    total_s = float(seconds.sum())
    least_s = min(settings.min_voice_s, settings.min_voice_share * total_s)
    large_s = max(least_s, settings.min_share * total_s)
    attempts = (
        (1, len(vectors), large_s),  # without the limits
        (min_voices, max_voices, large_s),
        (min_voices, min_voices, 0.0),  # with small clusters, up to the minimum number
    )
    for min_count, max_count, min_large_s in attempts:
        labels = _cut(merges, seconds, min_count, max_count, settings.min_cosine, min_large_s)
        voices = _voices(vectors, seconds, labels, min_large_s, settings)[:max_count]
        if min_voices <= len(voices) <= max_voices:
            break
    return voices


def _voices(
    vectors: Vectors,
    seconds: npt.NDArray[np.float32],
    labels: Labels,
    large_s: float,
    settings: ClusteringSettings,
) -> Vectors:
    """Return the directions of the clusters that are voices: large ones and distinct small ones."""
    totals = np.bincount(labels, weights=seconds)
    weighted = vectors * seconds[:, None]
    sums = [weighted[labels == cluster].sum(0) for cluster in range(len(totals))]
    directions = unit(np.stack(sums))
    voice_clusters = np.flatnonzero(totals >= large_s).tolist()
    distinct_s = max(settings.min_distinct_s, settings.min_share * float(seconds.sum()))
    for cluster in np.argsort(-totals, kind="stable").tolist():
        max_cosine = (directions[voice_clusters] @ directions[cluster]).max(initial=-1.0)
        if distinct_s <= totals[cluster] < large_s and max_cosine < settings.max_distinct_cosine:
            voice_clusters.append(cluster)
    return np.asarray(directions[voice_clusters])


def assign(similarity: npt.NDArray[np.float32], groups: Sequence[Sequence[int]]) -> Labels:
    """Assign each vector to a voice, and the vectors of a group to different voices if possible.

    Args:
        similarity: (n, voices), the similarity of vectors and voices.
        groups: indices of vectors with different voices, such as overlapping speech.

    Returns:
        (n,), the indices of the voices.
    """
    labels = np.asarray(similarity.argmax(1), np.int64)
    for group in groups:
        if len(group) < 2 or len({int(labels[i]) for i in group}) == len(group):
            continue
        for row, voice in _best_pairs(similarity[list(group)]):
            labels[group[row]] = voice
    return labels


def _best_pairs(similarity: npt.NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Yield pairs of a row and a column, most similar first, each row and column once."""
    remaining = similarity.copy()
    for _ in range(min(remaining.shape)):
        row, column = map(int, np.unravel_index(remaining.argmax(), remaining.shape))
        yield row, column
        remaining[row], remaining[:, column] = -np.inf, -np.inf


def _merges(vectors: Vectors, weights: npt.NDArray[np.float32]) -> list[_ClusterMerge]:
    """Return all merges down to one cluster, most similar first (nearest-neighbour chains)."""
    sums, totals = vectors * weights[:, None], weights.astype(np.float32)
    merged = np.zeros(len(vectors), bool)
    merges, chain = list[_ClusterMerge](), list[int]()
    while len(merges) < len(vectors) - 1:
        if not chain:
            chain.append(int(np.argmin(merged)))
        last = chain[-1]
        similarity = sums @ sums[last] / (totals * totals[last])
        similarity[merged], similarity[last] = -np.inf, -np.inf
        nearest = int(similarity.argmax())
        if len(chain) < 2 or similarity[nearest] > similarity[chain[-2]]:
            chain.append(nearest)
            continue
        target = chain[-2]
        del chain[-2:]
        merges.append(_ClusterMerge(float(similarity[target]), target, last))
        sums[target] += sums[last]
        totals[target] += totals[last]
        merged[last] = True
    return sorted(merges, key=lambda merge: -merge.cosine)


def _cut(
    merges: Sequence[_ClusterMerge],
    seconds: npt.NDArray[np.float32],
    min_voices: int,
    max_voices: int,
    min_cosine: float,
    large_s: float,
) -> Labels:
    """Merge similar clusters; merge more or fewer to keep the number of large clusters in bounds.

    Returns:
        The cluster of each vector.
    """
    n_similar = sum(merge.cosine >= min_cosine for merge in merges)
    totals = seconds.astype(np.float64)
    n_large = [int((totals >= large_s).sum())]
    for merge in merges:
        target_s, source_s = totals[merge.target], totals[merge.source]
        joined_s = target_s + source_s
        totals[merge.target], totals[merge.source] = joined_s, 0.0
        change = int(joined_s >= large_s) - int(target_s >= large_s) - int(source_s >= large_s)
        n_large.append(n_large[-1] + change)
    excess = [max(min_voices - count, count - max_voices, 0) for count in n_large]
    count = min(range(len(n_large)), key=lambda n: (excess[n], abs(n - n_similar)))
    labels = np.arange(len(seconds))
    for merge in merges[:count]:
        labels[labels == merge.source] = merge.target
    return np.asarray(np.unique(labels, return_inverse=True)[1], np.int64)


REFERENCE_S = (2.0, 10.0)  # minimum and maximum seconds of a known speaker's reference
_MIN_REFERENCE_SPEECH_S = 1.0  # minimum seconds of speech in a reference
# Thresholds, tuned with `python -m eval speakers`.
_ONSET_DELAY_S = 0.045  # delay of the network; turns start earlier by this much
_MAX_FILLED_GAP_S = 0.2  # fill shorter pauses of a speaker
_MIN_TURN_S = 0.15  # drop shorter turns
_MIN_CLUSTERED_S = 1.0  # minimum speech of vectors that are clustered, if there are enough
_MIN_KNOWN_COSINE = 0.5  # minimum cosine similarity of a voice to a known speaker


def turns(pieces: SpeakerEmbeddings, labels: Labels) -> list[tuple[float, float, int]]:
    """Join pieces of speech to turns.

    Args:
        pieces: the m pieces of speech.
        labels: (m,), the voice of each piece.

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
        start_s = max(0.0, start_s - _ONSET_DELAY_S)
        voice_turns = joined.setdefault(voice, [])
        if voice_turns and start_s - voice_turns[-1][1] < _MAX_FILLED_GAP_S:
            start_s, end_s = voice_turns[-1][0], max(end_s, voice_turns.pop()[1])
        voice_turns.append((start_s, min(end_s, pieces.seconds)))
    return sorted(
        (start_s, end_s, voice)
        for voice, voice_turns in joined.items()
        for start_s, end_s in voice_turns
        if end_s - start_s >= _MIN_TURN_S
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


class Diarizer:
    """A diarizer of recordings, which loads its networks. Thread-safe.

    Args:
        device: the networks' device, such as "cpu" or "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self._models = DiarizationModels(torch.device(device))

    def diarize(
        self,
        samples: Samples | Iterable[Samples],
        *,
        min_speakers: int = 1,
        max_speakers: int | None = None,
        known: Sequence[KnownSpeaker] = (),
    ) -> tuple[SpeakerTurn, ...]:
        """Find the speaker turns of a recording.

        Args:
            samples: float32 (n,) in [-1, 1] at 16 kHz mono, or blocks of them.
            min_speakers: >= 1; fewer are returned if too few voices are found.
            max_speakers: >= min_speakers; None: no limit.
            known: speakers to identify by name.

        Returns:
            Turns in order of time; () if there is no speech.

        Raises:
            RequestError: a reference does not have exactly one voice.
        """
        references = [self._reference(speaker) for speaker in known]
        pieces = self._models.embed([samples] if isinstance(samples, np.ndarray) else samples)
        if not len(pieces.vectors):
            return ()
        reliable = pieces.speech_s >= _MIN_CLUSTERED_S
        if reliable.sum() < min_speakers:
            reliable[:] = True
        voices = centroids(
            pieces.vectors[reliable],
            pieces.speech_s[reliable],
            min_speakers,
            max_speakers or max(min_speakers, len(pieces.vectors)),
            ClusteringSettings(),
        )
        labels = assign(pieces.vectors @ voices.T, list(_overlapping_pairs(pieces)))
        found = turns(pieces, labels)
        names = dict[int, str]()
        if references:
            cosines = voices @ np.stack(references).T
            pairs = _best_pairs(cosines)
            names = {v: known[i].name for v, i in pairs if cosines[v, i] >= _MIN_KNOWN_COSINE}
        names = with_letters((voice for _, _, voice in found), names)
        return tuple(SpeakerTurn(start_s, end_s, names[voice]) for start_s, end_s, voice in found)

    def _reference(self, speaker: KnownSpeaker) -> Vectors:
        """Return the vector of a known speaker's voice, (size,)."""
        seconds, (min_s, max_s) = len(speaker.samples) / SAMPLE_RATE, REFERENCE_S
        sample = f"the reference of {shown(speaker.name)}"
        if not min_s <= seconds <= max_s:
            raise RequestError(f"{sample} lasts {seconds:.1f} s; expected {min_s:g} to {max_s:g} s")
        pieces = self._models.embed([speaker.samples])
        if pieces.speech_s.sum() < _MIN_REFERENCE_SPEECH_S:
            raise RequestError(
                f"{sample} has no speech; expected at least {_MIN_REFERENCE_SPEECH_S:g} s of it"
            )
        settings = ClusteringSettings(min_voice_s=_MIN_REFERENCE_SPEECH_S)
        voices = centroids(pieces.vectors, pieces.speech_s, 1, 2, settings)
        if len(voices) > 1:
            raise RequestError(f"{sample} has two voices; expected a single speaker")
        return np.asarray(voices[0])


def _overlapping_pairs(pieces: SpeakerEmbeddings) -> Iterator[tuple[int, int]]:
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


def with_letters(speakers: Iterable[T], names: Mapping[T, str]) -> dict[T, str]:
    """Return `names` with further names for the other speakers, in their order: A to Z, AA, …"""
    named, used = dict(names), set(names.values())
    texts = (itertools.product(string.ascii_uppercase, repeat=n) for n in itertools.count(1))
    letters = map("".join, itertools.chain.from_iterable(texts))
    for speaker in speakers:
        if speaker not in named:
            named[speaker] = next(name for name in letters if name not in used)
    return named
