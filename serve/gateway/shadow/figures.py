"""How far the served answers are from those of the reference, as figures and as metrics.

Each request has two figures. Its *edits* are the characters in which the two texts differ; all
requests together have a rate of them, the CER against the reference. Its *gaps* are differences of
the network's scores. They show an engine that computes wrongly before its words are wrong;
docs/shadow.md says why these, and what they find how soon.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import fmean, stdev

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
_MOST = 3.0  # standard deviations that one request adds
# Smaller gaps count as none: rounding alone makes gaps of about this size.
_FLOORS = {"log_probability": 0.01, "no_speech": 0.05, "language": 0.05}
_SURE = 1e-6  # probabilities nearer to 0 or 1 are clipped to this distance
_Z95 = 1.96


@dataclasses.dataclass(frozen=True)
class ScoreGaps:
    """The differences of two answers' scores, at least 0; None: one of them has no such score."""

    log_probability: float | None = None  # average, of the whole text
    no_speech: float | None = None  # log-odds of silence in the first window
    language: float | None = None  # log-odds of the language, where both found the same


KINDS = tuple(field.name for field in dataclasses.fields(ScoreGaps))
"""The names of gaps, which `serve.contract.server_config.ShadowBaseline` has, too."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One request's answer, compared with the reference's."""

    language: str  # of the answer; empty: there is no speech
    edits: int
    characters: int  # of the reference's text
    gaps: ScoreGaps = ScoreGaps()

    @property
    def cer(self) -> float:
        """The share of characters that differ, of at least one."""
        return self.edits / max(1, self.characters)


def compare(served: Transcript, reference: Transcript) -> Comparison:
    """Compare two answers to the same request."""
    expected, text = normalize_text(reference.text), normalize_text(served.text)
    edits = char_edits(expected, text)
    language = served.language or reference.language or ""
    return Comparison(language, edits, len(expected), gaps_of(served, reference))


def gaps_of(served: Transcript, reference: Transcript) -> ScoreGaps:
    """Return the differences of two answers' scores."""
    language = None
    if served.language == reference.language:
        language = _apart(_log_odds(served.language_prob), _log_odds(reference.language_prob))
    return ScoreGaps(
        _apart(_mean_logprob(served), _mean_logprob(reference)),
        _apart(_no_speech(served), _no_speech(reference)),
        language,
    )


def _apart(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else abs(one - other)


def _mean_logprob(transcript: Transcript) -> float | None:
    """Average over a text's tokens; None if tokens were sampled, or there are none."""
    total, tokens = 0.0, 0
    for segment in transcript.segments:
        if segment.temperature > 0 or segment.avg_logprob is None:
            return None
        total += segment.avg_logprob * len(segment.tokens)
        tokens += len(segment.tokens)
    return total / tokens if tokens else None


def _no_speech(transcript: Transcript) -> float | None:
    return _log_odds(transcript.segments[0].no_speech_prob) if transcript.segments else None


def _log_odds(probability: float | None) -> float | None:
    if probability is None:
        return None
    probability = min(max(probability, _SURE), 1 - _SURE)
    return math.log(probability / (1 - probability))


@dataclasses.dataclass(frozen=True)
class PooledRate:
    """A pooled rate with its interval of 95 %."""

    value: float
    low: float
    high: float


def pooled_cer(comparisons: Sequence[Comparison]) -> PooledRate | None:
    """Return the pooled CER of requests; None if the reference has no text.

    The confidence interval is that of a ratio estimate. It treats requests as the sampled units:
    Cochran, Sampling Techniques (1977), section 6.4.
    """
    count, characters = len(comparisons), sum(comparison.characters for comparison in comparisons)
    if not characters:
        return None
    value = sum(comparison.edits for comparison in comparisons) / characters
    if count < 2:
        return PooledRate(
            value, 0.0, max(1.0, value)
        )  # one request says nothing about the variance
    squares = sum(
        (comparison.edits - value * comparison.characters) ** 2 for comparison in comparisons
    )
    margin = _Z95 * math.sqrt(count * squares / (count - 1)) / characters
    return PooledRate(value, max(0.0, value - margin), value + margin)


def _scale(kind: str, gap: float) -> float:
    """Return a gap on the scale of the sum: its logarithm, for some gaps are far above the rest."""
    return math.log(gap + _FLOORS[kind])


def baseline_of(comparisons: Sequence[Comparison]) -> ShadowBaseline:
    """Find the mean and the spread of each kind of gap; (0, 0) where there are too few."""
    found = {}
    for kind in KINDS:
        gaps = (getattr(one.gaps, kind) for one in comparisons)
        values = [_scale(kind, gap) for gap in gaps if gap is not None]
        if len(values) > 1:
            found[kind] = (round(fmean(values), 3), round(stdev(values), 3))
    return ShadowBaseline(**found)


class DriftCusum:
    """The sum of the rises of gaps above their baseline: Page's CUSUM (1954).

    Args:
        baseline: the mean and spread of gaps while all is well; a spread of 0: not known.
    """

    def __init__(self, baseline: ShadowBaseline) -> None:
        self.value = 0.0
        self._baseline = {
            kind: (mean, spread)
            for kind, (mean, spread) in dataclasses.asdict(baseline).items()
            if spread
        }

    def add(self, gaps: ScoreGaps) -> None:
        """Add the gaps of one more request."""
        rises = [
            (_scale(kind, gap) - mean) / spread
            for kind, (mean, spread) in self._baseline.items()
            if (gap := getattr(gaps, kind)) is not None
        ]
        if rises:  # each kind counts the same, and their sum has a spread of about 1 again
            rise = sum(rises) / math.sqrt(len(rises))
            self.value = max(0.0, self.value + min(rise, _MOST) - ALLOWANCE)


class ShadowMetrics:
    """The monitor's metrics. A label appears once there is a figure for it.

    Args:
        registry: the registry of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"earshot_shadow_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"earshot_shadow_{name}", text, labels, registry=registry)

        self.sampled = counter("sampled", "Answered requests that were taken as samples")
        self.dropped = counter("dropped", "Samples that went uncompared, for want of room")
        self.failed = counter("failed", "Samples that the reference has not answered")
        self.yielded = counter("yielded", "Samples put back, for a client's request had come")
        self.compared = counter("compared", "Samples that were compared", "language")
        self.pending_bytes = gauge("pending_bytes", "Bytes of samples that wait")
        self.pending = gauge("pending_requests", "Samples that wait")
        self._cer = gauge("cer", "CER of served against reference, of the last 1000", "language")
        self._low = gauge("cer_low", "Lower end of its interval of 95 %", "language")
        self._high = gauge("cer_high", "Upper end of its interval of 95 %", "language")
        self.drift = gauge("drift", "How far gaps of log-probabilities have risen: a CUSUM")
        bound = gauge("drift_bound", "Beyond it the served engine has drifted")
        bound.set(BOUND)

    def tell_cer(self, comparisons: Sequence[Comparison], language: str) -> None:
        """Set the rate of a language from its comparisons."""
        if rate := pooled_cer(comparisons):
            self._cer.labels(language).set(rate.value)
            self._low.labels(language).set(rate.low)
            self._high.labels(language).set(rate.high)
