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
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from serve.contract.errors import RequestError, shown
from serve.contract.messages import Samples
from serve.speakers.inference import (
    DiarizationModels,
    SpeakerEmbeddings,
    Vectors,
    unit,
)
from serve.speakers.networks import HOP, OFFSET
from serve.speech.rate import SAMPLE_RATE

Labels = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class ClusteringSettings:
    """The thresholds that define a voice, tuned with `python -m eval speakers`.

    A cluster is a voice if it has `least_s` seconds or `least_share` of all speech. A smaller
    cluster is a voice if it has `distinct_s` seconds and is unlike every other voice. The speech of
    the remaining clusters is assigned to the most similar voice.
    """

    alike: float = 0.42  # minimum average cosine of clusters to merge
    least_s: float = 4.0
    least_share: float = 0.1
    distinct_s: float = 1.2
    distinct: float = 0.3  # maximum cosine of a small voice to every other voice
    rare_share: float = 0.01  # minimum share of any voice; noise adds up over hours


@dataclasses.dataclass(frozen=True)
class _ClusterMerge:
    """A merge of two clusters, each identified by the index of one vector."""

    alike: float
    kept: int
    gone: int


def centroids(
    vectors: Vectors,
    seconds: npt.NDArray[np.float32],
    least: int,
    most: int,
    rules: ClusteringSettings,
) -> Vectors:
    """Find the voices of a recording.

    Args:
        vectors: (n, size), unit vectors, n > 0.
        seconds: (n,), seconds of speech behind each vector.
        least: the minimum number of voices, >= 1; fewer vectors give fewer voices.
        most: the maximum number of voices, >= least.
        rules: the thresholds that define a voice.

    Returns:
        (voices, size), unit vectors.
    """
    merges = _merges(vectors, seconds)
    total_s = float(seconds.sum())
    least_s = min(rules.least_s, rules.least_share * total_s)
    large_s = max(least_s, rules.rare_share * total_s)
    tries = (
        (1, len(vectors), large_s),  # without the limits
        (least, most, large_s),
        (least, least, 0.0),  # with small clusters, up to the minimum number
    )
    for low, high, large in tries:
        labels = _cut(merges, seconds, low, high, rules.alike, large)
        voices = _voices(vectors, seconds, labels, large, rules)[:high]
        if least <= len(voices) <= most:
            break
    return voices


def _voices(
    vectors: Vectors,
    seconds: npt.NDArray[np.float32],
    labels: Labels,
    large_s: float,
    rules: ClusteringSettings,
) -> Vectors:
    """Return the directions of the clusters that are voices: large ones and distinct small ones."""
    totals = np.bincount(labels, weights=seconds)
    weighed = vectors * seconds[:, None]
    directions = unit(
        np.stack([weighed[labels == cluster].sum(0) for cluster in range(len(totals))])
    )
    kept = np.flatnonzero(totals >= large_s).tolist()
    distinct_s = max(rules.distinct_s, rules.rare_share * float(seconds.sum()))
    for cluster in np.argsort(-totals, kind="stable").tolist():
        alike = (directions[kept] @ directions[cluster]).max(initial=-1.0)
        if distinct_s <= totals[cluster] < large_s and alike < rules.distinct:
            kept.append(cluster)
    return np.asarray(directions[kept])


def assign(likeness: npt.NDArray[np.float32], groups: Sequence[Sequence[int]]) -> Labels:
    """Assign each vector to a voice, and the vectors of a group to different voices if possible.

    Args:
        likeness: (n, voices), the similarity of vectors and voices.
        groups: indices of vectors with different voices, such as overlapping speech.

    Returns:
        (n,), the indices of the voices.
    """
    labels = np.asarray(likeness.argmax(1), np.int64)
    for group in groups:
        if len(group) < 2 or len({int(labels[i]) for i in group}) == len(group):
            continue
        free = likeness[list(group)].copy()
        for _ in range(min(free.shape)):
            row, voice = map(int, np.unravel_index(free.argmax(), free.shape))
            labels[group[row]] = voice
            free[row], free[:, voice] = -np.inf, -np.inf
    return labels


def _merges(vectors: Vectors, weights: npt.NDArray[np.float32]) -> list[_ClusterMerge]:
    """Return all merges down to one cluster, most similar first (nearest-neighbour chains)."""
    sums, totals = vectors * weights[:, None], weights.astype(np.float32)
    gone = np.zeros(len(vectors), bool)
    merges, chain = list[_ClusterMerge](), list[int]()
    while len(merges) < len(vectors) - 1:
        if not chain:
            chain.append(int(np.argmin(gone)))
        last = chain[-1]
        likeness = sums @ sums[last] / (totals * totals[last])
        likeness[gone], likeness[last] = -np.inf, -np.inf
        nearest = int(likeness.argmax())
        if len(chain) < 2 or likeness[nearest] > likeness[chain[-2]]:
            chain.append(nearest)
            continue
        kept = chain[-2]
        del chain[-2:]
        merges.append(_ClusterMerge(float(likeness[kept]), kept, last))
        sums[kept] += sums[last]
        totals[kept] += totals[last]
        gone[last] = True
    return sorted(merges, key=lambda merge: -merge.alike)


def _cut(
    merges: Sequence[_ClusterMerge],
    seconds: npt.NDArray[np.float32],
    least: int,
    most: int,
    alike: float,
    large_s: float,
) -> Labels:
    """Merge similar clusters; merge more or fewer to keep the number of large ones in bounds."""
    wanted = sum(merge.alike >= alike for merge in merges)
    totals = seconds.astype(np.float64)
    large = [int((totals >= large_s).sum())]
    for merge in merges:
        kept, gone = totals[merge.kept], totals[merge.gone]
        totals[merge.kept], totals[merge.gone] = kept + gone, 0.0
        change = int(kept + gone >= large_s) - int(kept >= large_s) - int(gone >= large_s)
        large.append(large[-1] + change)
    missed = [max(least - count, count - most, 0) for count in large]
    count = min(range(len(large)), key=lambda done: (missed[done], abs(done - wanted)))
    labels = np.arange(len(seconds))
    for merge in merges[:count]:
        labels[labels == merge.gone] = merge.kept
    return np.asarray(np.unique(labels, return_inverse=True)[1], np.int64)


REFERENCE_S = (2.0, 10.0)  # minimum and maximum seconds of a known speaker's reference
_VOICE_S = 1.0  # minimum seconds of speech in a reference
# Thresholds, tuned with `python -m eval speakers`.
_EARLY_S = 0.045  # start a turn earlier by this much, because the network is late
_GAP_S = 0.2  # fill shorter pauses of a speaker
_TURN_S = 0.15  # drop shorter turns
_SURE_S = 1.0  # minimum speech of vectors that are clustered, if there are enough
_NAMED = 0.5  # minimum cosine similarity of a voice to a known speaker


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
        start_s = max(0.0, start_s - _EARLY_S)
        own = joined.setdefault(voice, [])
        if own and start_s - own[-1][1] < _GAP_S:
            start_s, end_s = own[-1][0], max(end_s, own.pop()[1])
        own.append((start_s, min(end_s, pieces.seconds)))
    return sorted(
        (start_s, end_s, voice)
        for voice, own in joined.items()
        for start_s, end_s in own
        if end_s - start_s >= _TURN_S
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
        least: int = 1,
        most: int | None = None,
        known: Sequence[KnownSpeaker] = (),
    ) -> tuple[SpeakerTurn, ...]:
        """Find the speaker turns of a recording.

        Args:
            samples: float32 (n,) in [-1, 1] at 16 kHz mono, or blocks of them.
            least: the minimum number of speakers, >= 1; fewer are returned if too few voices are
                found.
            most: the maximum number of speakers, >= least; None: no limit.
            known: speakers to identify by name.

        Returns:
            Turns in order of time; () if there is no speech.

        Raises:
            RequestError: a reference does not have exactly one voice.
        """
        references = [self._reference(speaker) for speaker in known]
        pieces = self._models.hear([samples] if isinstance(samples, np.ndarray) else samples)
        if not len(pieces.vectors):
            return ()
        sure = pieces.speech_s >= _SURE_S
        if sure.sum() < least:
            sure[:] = True
        voices = centroids(
            pieces.vectors[sure],
            pieces.speech_s[sure],
            least,
            most or max(least, len(pieces.vectors)),
            ClusteringSettings(),
        )
        labels = assign(pieces.vectors @ voices.T, list(_at_once(pieces)))
        spoken = turns(pieces, labels)
        named = _named(voices, references, _NAMED)
        names = {voice: known[index].name for voice, index in named.items()}
        free = letters(set(names.values()))
        for _, _, voice in spoken:
            if voice not in names:
                names[voice] = next(free)
        return tuple(SpeakerTurn(start_s, end_s, names[voice]) for start_s, end_s, voice in spoken)

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
        rules = ClusteringSettings(least_s=_VOICE_S)
        voices = centroids(pieces.vectors, pieces.speech_s, 1, 2, rules)
        if len(voices) > 1:
            raise RequestError(f"{subject} has two voices; expected a single speaker")
        return np.asarray(voices[0])


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
