"""Predictions -> figures: error rates with their uncertainty, latency, throughput, gates. Pure.

Word and character errors come from jiwer (Levenshtein alignment); spaces count as characters. A
rate is (substitutions + deletions + insertions) / reference length over all clips together, not a
mean of rates. A clip with an empty reference has length 0, and whatever is said there counts as
insertions. Intervals are percentile bootstraps over clips.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jiwer
import numpy as np
import numpy.typing as npt

from eval.accuracy.data import SystemFacts, TimedCall
from eval.accuracy.load import wall_s
from eval.accuracy.normalize import normalizer

BOOTSTRAP_SAMPLES = 2_000
BOOTSTRAP_SEED = 20
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Counts:
    """Edits between references and hypotheses."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    hits: int = 0

    @property
    def errors(self) -> int:
        """All edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def length(self) -> int:
        """Words or characters in the references."""
        return self.substitutions + self.deletions + self.hits

    def __add__(self, other: "Counts") -> "Counts":
        """Counts of both together."""
        return Counts(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.hits + other.hits,
        )


@dataclasses.dataclass(frozen=True)
class Rate:
    """An error rate in percent; None where the references are empty."""

    percent: float | None
    low: float | None  # of the interval
    high: float | None
    counts: Counts


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Error rates over some clips."""

    clips: int
    cer: Rate
    wer: Rate


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds from handing over a file's bytes to the whole answer."""

    calls: int
    p50_s: float
    p95_s: float
    p99_s: float
    jitter_s: float | None  # root mean square over clips of one clip's deviation between passes


@dataclasses.dataclass(frozen=True)
class SystemScore:
    """Everything that the report says about one system."""

    facts: SystemFacts
    by_clip: dict[str, Counts]  # character edits of each clip, by file name
    overall: Accuracy
    raw: Accuracy  # without normalising
    by_language: dict[str, Accuracy]
    language_right: int
    language_of: int  # clips with speech
    silent_clips: int
    silent_with_text: int
    unstable: tuple[str, ...]  # clips whose text was not the same in every call
    errors: tuple[str, ...]  # calls that failed
    alone: Latency
    loaded: Latency
    ten_second_s: float | None  # median latency of the clip nearest to 10 s, one call at a time
    rtfx_alone: float
    rtfx_loaded: float


@dataclasses.dataclass(frozen=True)
class Gate:
    """A bound that fails the run; `passed` is None where a system that it needs did not run."""

    name: str
    passed: bool | None
    detail: str


def word_counts(reference: str, hypothesis: str) -> Counts:
    """Word edits of one clip."""
    out = jiwer.process_words([reference], [hypothesis])
    return Counts(out.substitutions, out.deletions, out.insertions, out.hits)


def char_counts(reference: str, hypothesis: str) -> Counts:
    """Character edits of one clip; spaces are characters."""
    out = jiwer.process_characters([reference], [hypothesis])
    return Counts(out.substitutions, out.deletions, out.insertions, out.hits)


def rate(clips: Sequence[Counts]) -> Rate:
    """The pooled rate of some clips and its bootstrap interval."""
    total = sum(clips, Counts())
    if total.length == 0:
        return Rate(None, None, None, total)
    low, high = _interval(_resampled(clips))
    return Rate(100.0 * total.errors / total.length, low, high, total)


def gap_interval(ours: Sequence[Counts], theirs: Sequence[Counts]) -> tuple[float, float]:
    """Bootstrap interval of the difference of two rates over the same clips, in points."""
    return _interval(_resampled(ours) - _resampled(theirs))


def _resampled(clips: Sequence[Counts]) -> npt.NDArray[np.float64]:
    """Rates in percent of (BOOTSTRAP_SAMPLES,) draws of clips; nan where a draw has no text.

    The draws depend only on the number of clips, so two systems' draws are paired.
    """
    errors = np.array([clip.errors for clip in clips], dtype=np.float64)
    lengths = np.array([clip.length for clip in clips], dtype=np.float64)
    draw = np.random.default_rng(BOOTSTRAP_SEED)
    picks = draw.integers(0, len(clips), size=(BOOTSTRAP_SAMPLES, len(clips)))
    total = lengths[picks].sum(axis=1)
    total[total == 0] = np.nan
    rates: npt.NDArray[np.float64] = 100.0 * errors[picks].sum(axis=1) / total
    return rates


def _interval(rates: npt.NDArray[np.float64]) -> tuple[float, float]:
    tail = 100.0 * (1.0 - CONFIDENCE) / 2.0
    low, high = np.nanpercentile(rates, [tail, 100.0 - tail])
    return float(low), float(high)


def scored_calls(calls: Sequence[TimedCall]) -> list[TimedCall]:
    """The calls whose text is scored, by file name: the first pass under load, one a clip."""
    chosen = [call for call in calls if call.phase == "loaded" and call.repeat == 0]
    return sorted(chosen, key=lambda call: call.file)


def accuracy(calls: Sequence[TimedCall], normalize: Callable[[str], str]) -> Accuracy:
    """Error rates of some scored calls."""
    pairs = [(normalize(call.reference), normalize(call.text)) for call in calls]
    return Accuracy(
        clips=len(calls),
        cer=rate([char_counts(*pair) for pair in pairs]),
        wer=rate([word_counts(*pair) for pair in pairs]),
    )


def latency(calls: Sequence[TimedCall]) -> Latency:
    """Percentiles (linear between ranks) over all calls, and jitter."""
    values = np.array([call.latency_s for call in calls])
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    by_clip = [
        [call.latency_s for call in calls if call.file == file]
        for file in {call.file for call in calls}
    ]
    variances = [float(np.var(times, ddof=1)) for times in by_clip if len(times) > 1]
    jitter = float(np.sqrt(np.mean(variances))) if variances else None
    return Latency(len(calls), float(p50), float(p95), float(p99), jitter)


def rtfx(calls: Sequence[TimedCall]) -> float:
    """Throughput of one phase: seconds of real, unpadded audio answered per second of wall clock.

    Calls that failed add no audio.
    """
    return sum(call.duration_s for call in calls if call.error is None) / wall_s(calls)


def score_system(
    facts: SystemFacts, calls: Sequence[TimedCall], normalizer_name: str
) -> SystemScore:
    """Score one system's calls; all three phases must be there."""
    normalize = normalizer(normalizer_name)
    scored = scored_calls(calls)
    spoken = [call for call in scored if call.reference.strip()]
    silent = [call for call in scored if not call.reference.strip()]
    alone = [call for call in calls if call.phase == "alone"]
    loaded = [call for call in calls if call.phase == "loaded"]
    one_clip = [call.latency_s for call in calls if call.phase == "one_clip"]
    return SystemScore(
        facts=facts,
        by_clip={
            call.file: char_counts(normalize(call.reference), normalize(call.text))
            for call in scored
        },
        overall=accuracy(scored, normalize),
        raw=accuracy(scored, normalizer("raw")),
        by_language={
            language: accuracy([call for call in spoken if call.language == language], normalize)
            for language in sorted({str(call.language) for call in spoken})
        },
        language_right=sum(
            call.prediction is not None and call.prediction.language == call.language
            for call in spoken
        ),
        language_of=len(spoken),
        silent_clips=len(silent),
        silent_with_text=sum(bool(normalize(call.text)) for call in silent),
        unstable=_unstable(calls),
        errors=tuple(f"{call.file}: {call.error}" for call in calls if call.error),
        alone=latency(alone),
        loaded=latency(loaded),
        ten_second_s=float(np.median(one_clip)) if one_clip else None,
        rtfx_alone=rtfx(alone),
        rtfx_loaded=rtfx(loaded),
    )


def _unstable(calls: Sequence[TimedCall]) -> tuple[str, ...]:
    texts: dict[str, set[str]] = {}
    for call in calls:
        texts.setdefault(call.file, set()).add(call.text)
    return tuple(sorted(file for file, variants in texts.items() if len(variants) > 1))


def gates(
    scores: Sequence[SystemScore], max_gap_faster_whisper: float, max_gap_fp16: float
) -> list[Gate]:
    """Judge a run; limits are in points of percent.

    Each Earshot system is held against the faster-whisper system with the lowest CER, and INT8
    against FP16.
    """
    by_name = {score.facts.name: score for score in scores}
    theirs = [score for name, score in by_name.items() if name.startswith("faster-whisper")]
    best = min(theirs, key=_cer, default=None)
    best_name = best.facts.name if best else "faster-whisper"
    ours = [name for name in by_name if name.startswith("earshot-")] or ["earshot"]
    pairs = [(name, best_name, max_gap_faster_whisper) for name in ours]
    pairs.append(("earshot-int8", "earshot-fp16", max_gap_fp16))
    judged = [_gap_gate(a, b, limit, by_name) for a, b, limit in pairs]
    return [*judged, _error_gate(scores)]


def _cer(score: SystemScore) -> float:
    percent = score.overall.cer.percent
    return float("inf") if percent is None else percent


def _gap_gate(a: str, b: str, limit: float, by_name: dict[str, SystemScore]) -> Gate:
    name = f"CER of {a} at most {limit:g} points above {b}"
    missing = [system for system in (a, b) if system not in by_name]
    if missing:
        return Gate(name, None, f"{' and '.join(missing)} not in this run")
    first, second = by_name[a], by_name[b]
    if first.overall.cer.percent is None or second.overall.cer.percent is None:
        return Gate(name, None, "no clip has a reference text")
    gap = first.overall.cer.percent - second.overall.cer.percent
    low, high = gap_interval(list(first.by_clip.values()), list(second.by_clip.values()))
    detail = (
        f"{first.overall.cer.percent:.2f} % - {second.overall.cer.percent:.2f} % = "
        f"{gap:+.2f} points ({CONFIDENCE:.0%} interval {low:+.2f} to {high:+.2f})"
    )
    return Gate(name, gap <= limit + 1e-9, detail)


def _error_gate(scores: Sequence[SystemScore]) -> Gate:
    failed = [f"{score.facts.name}: {error}" for score in scores for error in score.errors]
    detail = f"{len(failed)} failed, the first: {failed[0]}" if failed else "0 failed"
    return Gate("every call answered", not failed, detail)
