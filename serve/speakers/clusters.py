"""Cluster the vectors of a recording to voices, by agglomerative clustering.

The similarity of two clusters is the average cosine between their vectors, weighted by the speech
behind each. That average is a product of two sums, so no matrix of all pairs is needed.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
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


def unit(vectors: Vectors) -> Vectors:
    """Scale vectors, (..., size), to length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-9), np.float32)


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
