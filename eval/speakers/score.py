"""Errors of diarization: of turns, and of each speaker's words."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import Counts, word_counts
from serve.speakers.diarize import SpeakerTurn


@dataclasses.dataclass(frozen=True)
class Errors:
    """Seconds of speech of each speaker, and of its errors."""

    speech_s: float = 0.0  # of the reference
    missed_s: float = 0.0
    invented_s: float = 0.0
    confused_s: float = 0.0  # another speaker's

    @property
    def rate(self) -> float:
        """Return the diarization error rate, % of the speech."""
        wrong = self.missed_s + self.invented_s + self.confused_s
        return 100 * wrong / self.speech_s if self.speech_s else float(wrong > 0) * 100

    def __add__(self, other: "Errors") -> "Errors":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Errors(*(mine + theirs for mine, theirs in pairs))


def errors(reference: Sequence[SpeakerTurn], hypothesis: Sequence[SpeakerTurn]) -> Errors:
    """Compare turns with the reference, each speaker with the one that fits best."""
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


def _activity(turns: Sequence[SpeakerTurn], edges: Sequence[float]) -> npt.NDArray[np.float64]:
    """Mark each active speaker between two edges with 1, (speakers, edges - 1)."""
    speakers = sorted({turn.speaker for turn in turns})
    active = np.zeros((len(speakers), max(0, len(edges) - 1)))
    for turn in turns:
        begin, end = np.searchsorted(edges, (turn.start_s, turn.end_s))
        active[speakers.index(turn.speaker), begin:end] = 1.0
    return active


def best_pairs(gain: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pair rows with columns, each once, so that the sum of the gains is highest.

    Dynamic programming over the sets of paired columns: exact, and quick for the few speakers of
    a recording.

    Args:
        gain: (rows, columns).

    Returns:
        Row and column of as many pairs as there are rows or columns.
    """
    rows, columns = gain.shape
    if columns > rows:
        return sorted((row, column) for column, row in best_pairs(gain.T))
    best: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {0: (0.0, ())}  # by a set of bits
    for row in range(rows):
        longer = dict(best)
        for taken, (total, pairs) in best.items():
            for column in range(columns):
                together, found = taken | 1 << column, total + gain[row, column]
                if together != taken and found > longer.get(together, (-np.inf, ()))[0]:
                    longer[together] = (found, (*pairs, (row, column)))
        best = longer
    return list(best[2**columns - 1][1])


# ---------------------------------------------------------------- words


Said = Iterable[tuple[str, str]]
"""Speakers and their texts, in order of time."""

_SPACELESS = re.compile(r"([\u3040-\u30ff\u3400-\u9fff])")
_normalize = normalizer(DEFAULT)


def cp_counts(reference: Said, hypothesis: Said) -> Counts:
    """Count the edits of each speaker's words, with speakers paired for the fewest (cpWER)."""
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
