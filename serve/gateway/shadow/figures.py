"""How far the answers that were served are from those of the reference. Pure.

Two figures of each request. Its *edits*: characters in which the texts differ, of which all
requests together have a rate, the CER against the reference. And its *gap*: the difference of the
two average log-probabilities, which tells of an engine that computes wrongly long before it says
wrong words; docs/operating.md says why, and what it finds how soon.
"""

import dataclasses
import math
from collections.abc import Sequence

from serve.contract.messages import Transcript
from serve.speech.bare import bare

ALLOWANCE = 0.3
"""Standard deviations by which the gap's logarithm may rise before they add up."""
BOUND = 20.0
"""Of the sum, beyond which the served engine has drifted."""
_MOST = 3.0  # standard deviations that one request adds
_FLOOR = 1e-3  # a gap below it is as good as none
_Z95 = 1.96


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A request's answer beside the reference's."""

    language: str  # of the answer; empty where nobody was heard
    edits: int
    characters: int  # of the reference's text
    gap: float | None  # None: a text is empty, or was sampled

    @property
    def cer(self) -> float:
        """The share of characters that differ, of at least one."""
        return self.edits / max(1, self.characters)


def compare(served: Transcript, reference: Transcript) -> Comparison:
    """Compare two answers to the same request."""
    import jiwer  # noqa: PLC0415 - of the gateways that watch alone

    expected, text = bare(reference.text), bare(served.text)
    if expected:
        out = jiwer.process_characters([expected], [text])
        edits = out.substitutions + out.deletions + out.insertions
    else:
        edits = len(text)
    language = served.language or reference.language or ""
    return Comparison(language, edits, len(expected), gap(served, reference))


def gap(served: Transcript, reference: Transcript) -> float | None:
    """Return how far the average log-probabilities of two answers are apart.

    None where one has no text, or was sampled at a temperature: chance is in it then.
    """
    both = _mean_logprob(served), _mean_logprob(reference)
    return None if None in both else abs(both[0] - both[1])  # type: ignore[operator]


def _mean_logprob(transcript: Transcript) -> float | None:
    total, tokens = 0.0, 0
    for segment in transcript.segments:
        if segment.temperature > 0 or segment.avg_logprob is None:
            return None
        total += segment.avg_logprob * len(segment.tokens)
        tokens += len(segment.tokens)
    return total / tokens if tokens else None


@dataclasses.dataclass(frozen=True)
class Rate:
    """A pooled rate with its interval of 95 %."""

    value: float
    low: float
    high: float


def pooled_cer(comparisons: Sequence[Comparison]) -> Rate | None:
    """Pool the CER of requests; None where the reference has no text.

    The interval is that of a ratio of two sums over requests, which are drawn together: Cochran,
    Sampling Techniques (1977), section 6.4.
    """
    count, characters = len(comparisons), sum(one.characters for one in comparisons)
    if not characters:
        return None
    value = sum(one.edits for one in comparisons) / characters
    if count < 2:
        return Rate(value, 0.0, math.inf)
    squares = sum((one.edits - value * one.characters) ** 2 for one in comparisons)
    margin = _Z95 * math.sqrt(count * squares / (count - 1)) / characters
    return Rate(value, max(0.0, value - margin), value + margin)


def scale(gap: float) -> float:
    """Return a gap's logarithm, by which it is judged: most are small, and a few very large."""
    return math.log(gap + _FLOOR)


class Drift:
    """Adds up by how much gaps are larger than they should be: Page's CUSUM (1954).

    Args:
        mean: of the logarithm of gaps, while all is well.
        spread: its standard deviation; 0: nothing is known, and nothing is added up.
    """

    def __init__(self, mean: float, spread: float) -> None:
        self.value = 0.0
        self._mean, self._spread = mean, spread

    def add(self, gap: float) -> None:
        """Take in one more request."""
        if self._spread:
            rise = (scale(gap) - self._mean) / self._spread
            self.value = max(0.0, self.value + min(rise, _MOST) - ALLOWANCE)
