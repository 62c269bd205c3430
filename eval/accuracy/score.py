"""Predictions -> figures: error rates with their uncertainty, latency, throughput; and gates.

Word and character errors come from jiwer (Levenshtein alignment); spaces count as characters. A
rate is (substitutions + deletions + insertions) / reference length over all clips together, not a
mean of rates. A clip with an empty reference has length 0, and all text on it counts as
insertions. Intervals are percentile bootstraps over clips.

The gap of two CERs over the same clips is known only within its interval (paired bootstrap, 95 %).
A gate passes if the whole interval is at most the limit, and fails if the whole interval is above
it. Otherwise it is not decided. A gap at its limit fails in about one run of 40.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence

import jiwer
import numpy as np
import numpy.typing as npt

from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import ClipSet, SystemFacts, TimedCall
from eval.config import EvalConfig
from eval.record import Check
from serve.contract.config import Precision

BOOTSTRAP_SAMPLES = 2_000
BOOTSTRAP_SEED = 20


@dataclasses.dataclass(frozen=True)
class Counts:
    """Edits between references and hypotheses."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    hits: int = 0

    @property
    def errors(self) -> int:
        """Count all edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def length(self) -> int:
        """Count words or characters in the references."""
        return self.substitutions + self.deletions + self.hits

    def __add__(self, other: "Counts") -> "Counts":
        """Add the counts of both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counts(*(own + more for own, more in pairs))


CountsPair = tuple[Counts, Counts]
"""The edits of our system and of another one on the same clip or other unit."""


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
    percentiles_s: tuple[float, ...]  # 0 to 100, every one


@dataclasses.dataclass(frozen=True)
class SetScore:
    """Figures of a system on one set of clips."""

    by_clip: dict[str, Counts]  # character edits of each clip, by file name
    groups: dict[str, str]  # of each clip, by file name; "" = none
    overall: Accuracy
    by_part: dict[str, Accuracy]  # of clips with speech, by group, or by language without a group
    language_right: int
    language_of: int  # clips with speech in a known language
    silent_clips: int
    silent_with_text: int


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed at which a system answered the timed clips."""

    alone: Latency
    loaded: Latency
    one_clip_s: float | None  # median latency of the clip nearest to 10 s, one call at a time
    rtfx_alone: float
    rtfx_loaded: float


@dataclasses.dataclass(frozen=True)
class SystemScore:
    """All figures of one system in the report."""

    facts: SystemFacts
    sets: dict[ClipSet, SetScore]
    speed: Speed | None  # None where it was not timed
    errors: tuple[str, ...]  # calls that failed


def in_common(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return indices of the words that two texts have in common, in order."""
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def word_counts(reference: str, hypothesis: str) -> Counts:
    """Count the word edits of one clip."""
    out = jiwer.process_words([reference], [hypothesis])
    return Counts(out.substitutions, out.deletions, out.insertions, out.hits)


def char_counts(reference: str, hypothesis: str) -> Counts:
    """Count the character edits of one clip; spaces are characters."""
    out = jiwer.process_characters([reference], [hypothesis])
    return Counts(out.substitutions, out.deletions, out.insertions, out.hits)


def rate(clips: Sequence[Counts]) -> Rate:
    """Pool the rate of some clips, with its bootstrap interval."""
    total = sum(clips, Counts())
    if total.length == 0:
        return Rate(None, None, None, total)
    return Rate(_percent(clips), *_interval(_bootstrap_rates(clips)), total)


def _percent(clips: Sequence[Counts]) -> float:
    total = sum(clips, Counts())
    return 100.0 * total.errors / total.length


def gap_interval(ours: Sequence[Counts], theirs: Sequence[Counts]) -> tuple[float, float]:
    """Bootstrap the interval of the difference of two rates over the same clips, in points."""
    return _interval(_bootstrap_rates(ours) - _bootstrap_rates(theirs))


def _bootstrap_rates(clips: Sequence[Counts]) -> npt.NDArray[np.float64]:
    """Return the error rates in percent of `BOOTSTRAP_SAMPLES` resamples of the clips.

    The rate of a resample without text is nan. The resamples depend only on the number of clips,
    so the rates of two systems are paired.
    """
    counts = np.array([(clip.errors, clip.length) for clip in clips], dtype=np.float64)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    picks = rng.integers(0, len(clips), size=(BOOTSTRAP_SAMPLES, len(clips)))
    errors, lengths = counts[picks].sum(axis=1).T
    lengths[lengths == 0] = np.nan
    rates: npt.NDArray[np.float64] = 100.0 * errors / lengths
    return rates


def _interval(rates: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.nanpercentile(rates, [2.5, 97.5])
    return float(low), float(high)


def compared_texts(call: TimedCall, normalize: Normalize) -> tuple[str, str]:
    """Normalise reference and hypothesis for comparison; the reference's language decides how."""
    return normalize(call.reference, call.language), normalize(call.text, call.language)


def accuracy(calls: Sequence[TimedCall], normalize: Normalize) -> Accuracy:
    """Compute the error rates of some scored calls."""
    pairs = [compared_texts(call, normalize) for call in calls]
    return Accuracy(
        clips=len(calls),
        cer=rate([char_counts(*pair) for pair in pairs]),
        wer=rate([word_counts(*pair) for pair in pairs]),
    )


def latency(calls: Sequence[TimedCall]) -> Latency:
    """Compute percentiles over all calls, linear between ranks."""
    values = [call.latency_s for call in calls]
    percentiles = tuple(np.percentile(values, np.arange(101)).tolist())
    return Latency(len(calls), percentiles[50], percentiles[95], percentiles[99], percentiles)


def wall_s(calls: Sequence[TimedCall]) -> float:
    """Return the seconds from the first call's start to the last answer of one phase."""
    ended_s = max(call.started_s + call.latency_s for call in calls)
    return ended_s - min(call.started_s for call in calls)


def rtfx(calls: Sequence[TimedCall]) -> float:
    """Return one phase's throughput: seconds of real, unpadded audio per second of wall clock.

    Calls that failed add no audio.
    """
    return sum(call.duration_s for call in calls if call.error is None) / wall_s(calls)


def score_system(
    facts: SystemFacts, calls: Sequence[TimedCall], normalize: Normalize
) -> SystemScore:
    """Score one system's calls: its texts, and its speed where it was timed."""
    scored = [call for call in calls if call.phase == "accuracy"]
    return SystemScore(
        facts=facts,
        sets={
            name: _score_set([call for call in scored if call.clip_set == name], normalize)
            for name in dict.fromkeys(call.clip_set for call in scored)
        },
        speed=_speed(calls),
        errors=tuple(f"{call.file}: {call.error}" for call in calls if call.error),
    )


def _score_set(calls: Sequence[TimedCall], normalize: Normalize) -> SetScore:
    """Score one call per clip. Clips are sorted by name, so that two systems' lists are paired."""
    calls = sorted(calls, key=lambda call: call.file)
    spoken = [call for call in calls if call.reference.strip()]
    silent = [call for call in calls if not call.reference.strip()]
    known = [call for call in spoken if call.language]
    detected = [call.prediction and call.prediction.language == call.language for call in known]
    parts: dict[str, list[TimedCall]] = {}
    for call in spoken:
        parts.setdefault(call.group or call.language or "unknown", []).append(call)
    return SetScore(
        by_clip={call.file: char_counts(*compared_texts(call, normalize)) for call in calls},
        groups={call.file: call.group for call in calls},
        overall=accuracy(calls, normalize),
        by_part={part: accuracy(parts[part], normalize) for part in sorted(parts)},
        language_right=sum(map(bool, detected)),
        language_of=len(known),
        silent_clips=len(silent),
        silent_with_text=sum(bool(normalize(call.text, None)) for call in silent),
    )


def _speed(calls: Sequence[TimedCall]) -> Speed | None:
    alone = [call for call in calls if call.phase == "alone"]
    loaded = [call for call in calls if call.phase == "loaded"]
    one_clip_s = [call.latency_s for call in calls if call.phase == "one_clip"]
    if not alone or not loaded:
        return None
    median_s = float(np.median(one_clip_s)) if one_clip_s else None
    return Speed(latency(alone), latency(loaded), median_s, rtfx(alone), rtfx(loaded))


# ---------------------------------------------------------------- gates


THEIR_DEFAULTS = ("faster-whisper-float32", "faster-whisper-int8")
"""faster-whisper as its users run it; ours is compared with the more accurate of them."""

_ROUNDING = 1e-9  # points

TITLES: dict[ClipSet, str] = {"heldout": "the held-out clips", "timed": "the timed clips"}


def gates(
    scores: Sequence[SystemScore],
    precision: Precision,
    settings: EvalConfig,
    groups: Sequence[str] = (),
) -> list[Check]:
    """Judge a run, on the clips that the compared systems transcribed.

    Args:
        scores: the scores of the systems that ran.
        precision: the configured engine's precision, which decides our default system.
        settings: the points of CER by which ours may be above faster-whisper, and INT8 above FP16.
        groups: groups of clips that decide; () is all clips.
    """
    by_name = {score.facts.name: score for score in scores}

    def gate(title: str, ours: str, others: Sequence[str], limit: float) -> Check:
        """Judge `ours` against the most accurate of `others`; `title` names these."""
        name = f"CER of {ours} at most {limit:g} points above {title}"
        missing = [system for system in (ours, *others) if system not in by_name]
        if missing or not others:
            return Check(name, None, f"{' and '.join(missing) or title} did not run")
        rivals = dict[str, list[CountsPair]]()
        for other in others:
            pairs = list(common_clips(by_name[ours], by_name[other], groups).values())
            if any(edits.length for edits, _ in pairs):
                rivals[other] = pairs
        if not rivals:
            return Check(name, None, "they have no clip with a reference text in common")
        other = max(rivals, key=lambda rival: _gap(rivals[rival]))
        return gap_gate(name, rivals[other], other, limit, "clips")

    default = f"earshot-{precision}"
    theirs = [name for name in THEIR_DEFAULTS if name in by_name]
    to_theirs, to_fp16 = settings.max_cer_gap_faster_whisper, settings.max_cer_gap_fp16
    return [
        gate("faster-whisper's default", default, theirs, to_theirs),
        gate("earshot-fp16", "earshot-int8", ["earshot-fp16"], to_fp16),
        # Behind Triton is the same transcriber, so a few clips are enough to see that it is.
        gate(f"{default} in process", "earshot-triton", [default], to_fp16),
        all_answered({score.facts.name: score.errors for score in scores}),
    ]


def common_clips(
    ours: SystemScore, theirs: SystemScore, groups: Sequence[str] = ()
) -> dict[tuple[ClipSet, str], CountsPair]:
    """Return the character edits on each clip of these groups that both systems transcribed.

    Args:
        ours: one system.
        theirs: the other one.
        groups: groups of clips; () is all clips.

    Returns:
        pairs by set and file.
    """
    return {
        (clip_set, file): (counts, theirs.sets[clip_set].by_clip[file])
        for clip_set, score in ours.sets.items()
        if clip_set in theirs.sets
        for file, counts in score.by_clip.items()
        if file in theirs.sets[clip_set].by_clip and (not groups or score.groups[file] in groups)
    }


def gap_gate(name: str, pairs: Sequence[CountsPair], other: str, limit: float, unit: str) -> Check:
    """Judge the gap of two rates by its interval.

    Args:
        name: the check's name.
        pairs: the edits of our system and of the other one, by clip or other unit.
        other: the other system's name.
        limit: the largest gap that passes, in points.
        unit: the units in words, such as "clips".
    """
    ours, theirs = zip(*pairs, strict=True)
    (low, high), gap = gap_interval(ours, theirs), _gap(pairs)
    detail = (
        f"{_percent(ours):.2f} % - {_percent(theirs):.2f} % ({other}) = {gap:+.2f} points "
        f"[{low:+.2f}, {high:+.2f}] at 95 % on {len(pairs)} {unit}"
    )
    if high <= limit + _ROUNDING:
        return Check(name, True, detail)
    if low > limit + _ROUNDING:
        return Check(name, False, detail)
    # The interval of a mean of paired differences shrinks with the root of the number of pairs.
    half, distance = (high - low) / 2, abs(limit - gap)
    needed = (
        f"about {math.ceil(len(pairs) * (half / distance) ** 2):,}" if distance else "no number"
    )
    return Check(name, None, f"{detail}, too few: {needed} of such {unit} would decide this gap")


def _gap(pairs: Sequence[CountsPair]) -> float:
    return _percent([ours for ours, _ in pairs]) - _percent([theirs for _, theirs in pairs])


def all_answered(errors: Mapping[str, Sequence[str]]) -> Check:
    """Check that no call failed; errors by system."""
    failed = [f"{name}: {error}" for name, of_system in errors.items() for error in of_system]
    detail = f"{len(failed)} failed, the first: {failed[0]}" if failed else "0 failed"
    return Check("every call answered", not failed, detail)
