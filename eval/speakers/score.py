"""Errors of diarization: who speaks when, and whose words they are."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import Counts, word_counts
from serve.speakers.diarize import Turn


@dataclasses.dataclass(frozen=True)
class Errors:
    """Seconds of speech, a speaker at a time, and what of them is wrong."""

    speech_s: float = 0.0  # of the reference
    missed_s: float = 0.0
    invented_s: float = 0.0
    confused_s: float = 0.0  # another speaker's

    @property
    def rate(self) -> float:
        """% of the speech."""
        wrong = self.missed_s + self.invented_s + self.confused_s
        return 100 * wrong / self.speech_s if self.speech_s else float(wrong > 0) * 100

    def __add__(self, other: "Errors") -> "Errors":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Errors(*(mine + theirs for mine, theirs in pairs))


def errors(reference: Sequence[Turn], hypothesis: Sequence[Turn]) -> Errors:
    """Hold turns against the right ones, each speaker against the one that fits best."""
    edges = sorted(
        {edge for turn in (*reference, *hypothesis) for edge in (turn.start_s, turn.end_s)}
    )
    lengths = np.diff(np.asarray(edges, np.float64)) if edges else np.zeros(0)
    right, claimed = (_activity(turns, edges) for turns in (reference, hypothesis))
    together = (right * lengths) @ claimed.T
    matched = sum(together[i, j] for i, j in best_pairs(together))
    wanted, there = right.sum(0), claimed.sum(0)
    return Errors(
        speech_s=float(lengths @ wanted),
        missed_s=float(lengths @ np.maximum(wanted - there, 0)),
        invented_s=float(lengths @ np.maximum(there - wanted, 0)),
        confused_s=float(lengths @ np.minimum(wanted, there) - matched),
    )


def _activity(turns: Sequence[Turn], edges: Sequence[float]) -> npt.NDArray[np.float64]:
    """Mark each speaker who speaks between two edges with 1, (speakers, edges - 1)."""
    speakers = sorted({turn.speaker for turn in turns})
    active = np.zeros((len(speakers), max(0, len(edges) - 1)))
    for turn in turns:
        begin, end = np.searchsorted(edges, (turn.start_s, turn.end_s))
        active[speakers.index(turn.speaker), begin:end] = 1.0
    return active


def best_pairs(gain: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pair rows with columns, each once, so that the gains of the pairs are the most together.

    The Hungarian algorithm: rows are added one by one, each along the cheapest path that leaves
    those before paired; potentials keep every cost of an edge from being negative.

    Args:
        gain: (rows, columns).

    Returns:
        Row and column of as many pairs as there are rows or columns.
    """
    if gain.shape[0] > gain.shape[1]:
        return sorted((row, column) for column, row in best_pairs(gain.T))
    rows, columns = gain.shape
    cost = gain.max(initial=0.0) - gain
    of_rows, of_columns = np.zeros(rows), np.zeros(columns + 1)
    partner = np.full(columns + 1, -1)  # the row of each column; the last one is a start
    for row in range(rows):
        partner[columns], column = row, columns
        distance, before = np.full(columns, np.inf), np.full(columns, columns)
        done = np.zeros(columns + 1, bool)
        while partner[column] >= 0:
            done[column], at = True, partner[column]
            reduced = cost[at] - of_rows[at] - of_columns[:columns]
            closer = ~done[:columns] & (reduced < distance)
            distance[closer], before[closer] = reduced[closer], column
            following = int(np.where(done[:columns], np.inf, distance).argmin())
            step = distance[following]
            of_rows[partner[done]] += step
            of_columns[done] -= step
            distance[~done[:columns]] -= step
            column = following
        while column != columns:
            partner[column], column = partner[before[column]], before[column]
    return sorted((int(row), column) for column, row in enumerate(partner[:columns]) if row >= 0)


# ---------------------------------------------------------------- words


Said = Iterable[tuple[str, str]]
"""Speakers and what they say, in order of time."""

_SPACELESS = re.compile(r"([\u3040-\u30ff\u3400-\u9fff])")
_normalize = normalizer(DEFAULT)


def cp_counts(reference: Said, hypothesis: Said) -> Counts:
    """Count the edits between what speakers say and what a system says of its speakers."""
    references, hypotheses = _by_speaker(reference), _by_speaker(hypothesis)
    size = max(len(references), len(hypotheses))
    references += [""] * (size - len(references))
    hypotheses += [""] * (size - len(hypotheses))
    counts = [[word_counts(text, other) for other in hypotheses] for text in references]
    errors = np.array([[pair.errors for pair in row] for row in counts], np.float64)
    pairs = best_pairs(-errors.reshape(size, size))
    return sum((counts[i][j] for i, j in pairs), Counts())


def counts_as_one(reference: Said, hypothesis: Said) -> Counts:
    """Count the edits between the words alone, whoever says them."""
    joined = (" ".join(text for _, text in texts) for texts in (reference, hypothesis))
    return word_counts(*map(_words, joined))


def _by_speaker(spoken: Said) -> list[str]:
    texts = collections.defaultdict[str, list[str]](list)
    for speaker, text in spoken:
        texts[speaker].append(text)
    return [_words(" ".join(own)) for own in texts.values()]


def _words(text: str) -> str:
    return " ".join(_SPACELESS.sub(r" \1 ", _normalize(text, None)).split())
