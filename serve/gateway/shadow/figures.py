"""The distance of the served answers from the reference's, as figures and as metrics.

Each request has two figures. Its *edits* are the characters in which the two texts differ; all
requests together have a rate of them, the CER against the reference. Its *gaps* are differences of
the network's scores. They show an engine that computes wrongly before its words are wrong;
docs/shadow.md has the reasons, and how soon they find a fault.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from serve.contract.edits import char_edits
from serve.contract.messages import Transcript
from serve.contract.server_config import ShadowBaseline
from serve.speech.text import normalize_text

ALLOWANCE = 0.5
"""Standard deviations by which requests' gaps may rise before they add up."""
BOUND = 25.0
"""The sum above which the served engine has drifted."""
ALL = "all"
"""The label of figures of all languages together."""
_MAX_RISE = 3.0  # standard deviations that one request adds
# Smaller gaps count as none: rounding alone makes gaps of about this size.
_FLOORS = {"log_probability": 0.01, "no_speech": 0.05, "language": 0.05}
_SURE = 1e-6  # probabilities nearer to 0 or 1 are clipped to this distance
_Z95 = 1.96


Gaps = Mapping[str, float | None]
"""Differences of two answers' scores, at least 0, by their names in `ShadowBaseline`.

The value is None if one of the answers has no such score.
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One request's answer, compared with the reference's."""

    language: str  # of the answer; empty: there is no speech
    edits: int
    characters: int  # of the reference's text
    gaps: Gaps

    @property
    def cer(self) -> float:
        """The share of characters that differ, of at least one."""
        return self.edits / max(1, self.characters)


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """The part of an answer that is compared."""

    text: str
    language: str | None
    scores: Mapping[str, float | None]  # by their names in `ShadowBaseline`


def scored(transcript: Transcript) -> ScoredText:
    """Take an answer's text and scores.

    The scores are the average log-probability, and the log-odds of silence at first and of the
    language.
    """
    segments = transcript.segments
    scores = {
        "log_probability": _mean_logprob(transcript),
        "no_speech": _log_odds(segments[0].no_speech_prob) if segments else None,
        "language": _log_odds(transcript.language_prob),
    }
    return ScoredText(transcript.text, transcript.language, scores)


def compare(served: ScoredText, reference: ScoredText) -> Comparison:
    """Compare two answers to the same request."""
    expected, text = normalize_text(reference.text), normalize_text(served.text)
    language = served.language or reference.language or ""
    gaps: dict[str, float | None] = {}
    for kind, score in served.scores.items():
        other = reference.scores[kind]
        gaps[kind] = None if score is None or other is None else abs(score - other)
    if served.language != reference.language:
        gaps["language"] = None
    return Comparison(language, char_edits(expected, text), len(expected), gaps)


def _mean_logprob(transcript: Transcript) -> float | None:
    """Average over a text's tokens; None if tokens were sampled, or there are none."""
    total, tokens = 0.0, 0
    for segment in transcript.segments:
        if segment.temperature > 0 or segment.avg_logprob is None:
            return None
        total += segment.avg_logprob * len(segment.tokens)
        tokens += len(segment.tokens)
    return total / tokens if tokens else None


def _log_odds(probability: float | None) -> float | None:
    if probability is None:
        return None
    probability = min(max(probability, _SURE), 1 - _SURE)
    return math.log(probability / (1 - probability))


def pooled_cer(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Return the pooled CER of requests; nothing if the reference has no text.

    The confidence interval is that of a ratio estimate. It treats requests as the sampled units:
    Cochran, Sampling Techniques (1977), section 6.4.

    Returns:
        The rate by "value", the ends of its interval of 95 % by "low" and "high".
    """
    count, characters = len(comparisons), sum(comparison.characters for comparison in comparisons)
    if not characters:
        return {}
    value = sum(comparison.edits for comparison in comparisons) / characters
    if count < 2:  # one request says nothing about the variance
        return {"value": value, "low": 0.0, "high": max(1.0, value)}
    squares = sum((case.edits - value * case.characters) ** 2 for case in comparisons)
    margin = _Z95 * math.sqrt(count * squares / (count - 1)) / characters
    return {"value": value, "low": max(0.0, value - margin), "high": value + margin}


def _scale(kind: str, gap: float) -> float:
    """Return a gap on the scale of the sum: its logarithm, for some gaps are far above the rest."""
    return math.log(gap + _FLOORS[kind])


def baseline_of(comparisons: Sequence[Comparison]) -> ShadowBaseline:
    """Return the mean and the spread of each kind of gap; (0, 0) where there are too few."""
    baseline = {}
    for kind in _FLOORS:
        gaps = (comparison.gaps[kind] for comparison in comparisons)
        values = [_scale(kind, gap) for gap in gaps if gap is not None]
        if len(values) > 1:
            baseline[kind] = (round(fmean(values), 3), round(stdev(values), 3))
    return ShadowBaseline(**baseline)


class DriftCusum:
    """The sum of the rises of gaps above their baseline: Page's CUSUM (1954).

    Args:
        baseline: the mean and spread of gaps while all is well; a spread of 0: not known.
    """

    def __init__(self, baseline: ShadowBaseline) -> None:
        self.value = 0.0
        self._baseline = dataclasses.asdict(baseline)

    def add(self, gaps: Gaps) -> None:
        """Add the gaps of one more request."""
        rises = [
            (_scale(kind, gap) - mean) / spread
            for kind, (mean, spread) in self._baseline.items()
            if spread and (gap := gaps[kind]) is not None
        ]
        if rises:  # each kind counts the same, and their sum has a spread of about 1 again
            rise = sum(rises) / math.sqrt(len(rises))
            self.value = max(0.0, self.value + min(rise, _MAX_RISE) - ALLOWANCE)


class ShadowMetrics:
    """The monitor's metrics. A label appears once there is a figure for it.

    Args:
        registry: the registry of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        options: Any = {"namespace": "earshot_shadow", "registry": registry}
        text = "Samples dropped: the queue was full, or a file failed"
        self.dropped = Counter("dropped", text, **options)
        text = "Samples requeued because a client's request arrived"
        self.requeued = Counter("yielded", text, **options)
        self.sampled = Counter("sampled", "Answered requests that were taken as samples", **options)
        self.failed = Counter("failed", "Samples for which the reference failed", **options)
        self.pending_bytes = Gauge("pending_bytes", "Bytes of samples that wait", **options)
        self.pending = Gauge("pending_requests", "Samples that wait", **options)
        self.drift = Gauge("drift", "CUSUM of the rise of the score gaps", **options)
        text = "Value of drift above which the served engine has drifted"
        Gauge("drift_bound", text, **options).set(BOUND)
        options |= {"labelnames": ("language",)}
        self.compared = Counter("compared", "Samples that were compared", **options)
        text = "CER against the reference, latest 1000 samples"
        self._cer = {
            "value": Gauge("cer", text, **options),
            "low": Gauge("cer_low", "Lower end of the 95 % interval", **options),
            "high": Gauge("cer_high", "Upper end of the 95 % interval", **options),
        }

    def tell_cer(self, comparisons: Sequence[Comparison], language: str) -> None:
        """Set the rate of a language from its comparisons."""
        for name, value in pooled_cer(comparisons).items():
            self._cer[name].labels(language).set(value)
