"""Which vectors are of one voice: agglomerative clustering of a whole recording.

Two clusters are as alike as the vectors of one and of the other are on average, weighed by how much
speech each is made of. That average is the product of two sums, so no matrix of all pairs is held.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules of what makes a voice; chosen by measurement, see `python -m eval speakers`."""

    alike: float = 0.42  # two clusters become one down to this cosine, on average
    least_s: float = 4.0  # of speech; what has less joins the one it is most like,
    least_share: float = 0.1  # unless it has this share of all speech,
    distinct_s: float = 1.2  # or so much, and a cosine to every other voice
    distinct: float = 0.3  # of less than this;
    rare_share: float = 0.01  # but no voice has less than this share: in hours, oddities add up


@dataclasses.dataclass(frozen=True)
class _Merge:
    """Two clusters that become one, each named after one of its vectors."""

    alike: float
    kept: int
    gone: int


def centroids(
    vectors: Vectors, seconds: npt.NDArray[np.float32], least: int, most: int, rules: Rules
) -> Vectors:
    """Find the voices of a recording.

    Args:
        vectors: (n, size) of length 1, n > 0.
        seconds: (n,), of speech behind each.
        least: voices there are at least, >= 1; fewer are found where there are fewer vectors.
        most: voices there are at most, >= least.
        rules: what makes a voice.

    Returns:
        (voices, size), of length 1.
    """
    merges = _merges(vectors, seconds)
    total_s = float(seconds.sum())
    least_s = min(rules.least_s, rules.least_share * total_s)
    large_s = max(least_s, rules.rare_share * total_s)
    tries = (
        (1, len(vectors), large_s),  # as if nothing were known of their number
        (least, most, large_s),
        (least, least, 0.0),  # small ones count, too, and no more than are needed
    )
    for low, high, large in tries:
        labels = _cut(merges, seconds, low, high, rules.alike, large)
        voices = _voices(vectors, seconds, labels, large, rules)[:high]
        if least <= len(voices) <= most:
            break
    return voices


def _voices(
    vectors: Vectors, seconds: npt.NDArray[np.float32], labels: Labels, large_s: float, rules: Rules
) -> Vectors:
    """Directions of the clusters that are voices: the large ones, and small ones like none."""
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
    """Give each vector a voice, and those of a group different ones while there are any.

    Args:
        likeness: (n, voices).
        groups: indices of vectors whose voices differ, such as of people who speak at once.

    Returns:
        (n,), the index of a voice.
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


def _merges(vectors: Vectors, weights: npt.NDArray[np.float32]) -> list[_Merge]:
    """Find all merges down to one cluster, most alike first, along chains of nearest neighbours."""
    sums, totals = vectors * weights[:, None], weights.astype(np.float32)
    gone = np.zeros(len(vectors), bool)
    merges, chain = list[_Merge](), list[int]()
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
        merges.append(_Merge(float(likeness[kept]), kept, last))
        sums[kept] += sums[last]
        totals[kept] += totals[last]
        gone[last] = True
    return sorted(merges, key=lambda merge: -merge.alike)


def _cut(
    merges: Sequence[_Merge],
    seconds: npt.NDArray[np.float32],
    least: int,
    most: int,
    alike: float,
    large_s: float,
) -> Labels:
    """Merge as far as clusters are alike, but so that the number of large ones is allowed."""
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
