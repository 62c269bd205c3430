"""Scores of long recordings: words lost, repeated and made up; and the gates.

As in `eval.accuracy.score`, a gap passes if its whole interval is within the limit, fails if the
whole interval is beyond it, and is not decided in between. Each of ours that has rivals is compared
with the most accurate of them on these recordings.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import jiwer

from eval.accuracy.predictions import SystemFacts, TimedCall, TimedText
from eval.accuracy.score import Counts, Rate, all_answered, char_counts, gap_gate, rate
from eval.accuracy.systems import LONG_THEIRS
from eval.long import OUR_DEFAULT, RIVALS
from eval.long.compose import AnnotatedRecording, Kind, Stretch
from eval.record import Check
from serve.speech.text import normalize_text

RUN = 3  # words in a row, from which on they count as a stretch
_FARTHEST = 60  # words between a stretch and its repetition
_ALIKE = 0.75  # share of words that are the same in a repeated stretch
NEAR_CUT_S = 0.5  # between a sentence and a cut that may have harmed it
TOUCH_S = 0.3  # text that overlaps less with every sentence lies outside speech
BLOCK_S = 60.0


@dataclasses.dataclass(frozen=True)
class SentenceScore:
    """The outcome of a sentence."""

    minute: tuple[str, int]  # in which it begins: the recording's file, and the number
    words: Counts
    characters: Counts
    at_cut: bool  # within `NEAR_CUT_S` of a place where the system cut the audio


@dataclasses.dataclass(frozen=True)
class RecordingScore:
    """The outcome of a recording."""

    sentences: tuple[SentenceScore, ...]
    lost_in_stretches: int  # lost words, `RUN` and more in a row
    repeated: int  # added words, `RUN` and more in a row that stand near by as well
    made_up: int  # added words in other stretches
    unspoken: int  # characters of text outside speech


def score_recording(recording: AnnotatedRecording, segments: Sequence[TimedText]) -> RecordingScore:
    """Compare the answer of a system with the text of a recording.

    Args:
        recording: the truth.
        segments: the system's segments, in order.
    """
    sentences = recording.sentences
    spoken = [normalize_text(sentence.text).split() for sentence in sentences]
    answered = [word for segment in segments for word in normalize_text(segment.text).split()]
    reference = " ".join(word for words in spoken for word in words)
    alignment = jiwer.process_words([reference], [" ".join(answered)]).alignments[0]
    cuts = _cut_regions(segments)
    outcomes = []
    for sentence, words, (counts, heard) in zip(
        sentences, spoken, _by_sentence(spoken, answered, alignment), strict=True
    ):
        minute = recording.file, int(sentence.start_s // BLOCK_S)
        characters = char_counts(" ".join(words), " ".join(heard))
        at_cut = any(_overlap_s(sentence, *cut) >= -NEAR_CUT_S for cut in cuts)
        outcomes.append(SentenceScore(minute, counts, characters, at_cut))
    lost = repeated = made_up = 0
    for chunk in alignment:
        lost_words = chunk.ref_end_idx - chunk.ref_start_idx
        added_words = chunk.hyp_end_idx - chunk.hyp_start_idx
        if chunk.type == "delete" and lost_words >= RUN:
            lost += lost_words
        elif chunk.type == "insert" and added_words >= RUN:
            if _repeats(answered, chunk.hyp_start_idx, added_words):
                repeated += added_words
            else:
                made_up += added_words
    unspoken = 0
    if len(sentences) < len(recording.stretches):  # there is a time without speech
        for segment in segments:
            overlaps = (_overlap_s(one, segment.start_s, segment.end_s) for one in sentences)
            if max(overlaps) <= TOUCH_S:
                unspoken += len(normalize_text(segment.text))
    return RecordingScore(tuple(outcomes), lost, repeated, made_up, unspoken)


def _overlap_s(sentence: Stretch, start_s: float, end_s: float) -> float:
    """Return how long both last together; below 0 it is the time between them."""
    return min(sentence.end_s, end_s) - max(sentence.start_s, start_s)


def _by_sentence(
    spoken: Sequence[Sequence[str]],
    answered: Sequence[str],
    alignment: Sequence[jiwer.AlignmentChunk],
) -> list[tuple[Counts, list[str]]]:
    """Return the word edits of each sentence, and the words aligned to it."""
    owner = [number for number, words in enumerate(spoken) for _ in words]
    hits, substituted, lost, added = ([0] * len(spoken) for _ in range(4))
    heard: list[list[str]] = [[] for _ in spoken]
    for chunk in alignment:
        for index in range(chunk.ref_start_idx, chunk.ref_end_idx):
            if chunk.type == "delete":
                lost[owner[index]] += 1
                continue
            (hits if chunk.type == "equal" else substituted)[owner[index]] += 1
            heard[owner[index]].append(answered[chunk.hyp_start_idx + index - chunk.ref_start_idx])
        if chunk.type == "insert":
            number = owner[max(0, chunk.ref_start_idx - 1)]
            added[number] += chunk.hyp_end_idx - chunk.hyp_start_idx
            heard[number] += answered[chunk.hyp_start_idx : chunk.hyp_end_idx]
    counts = map(Counts, substituted, lost, added, hits)
    return list(zip(counts, heard, strict=True))


def _repeats(answered: Sequence[str], start: int, length: int) -> bool:
    """Return whether a stretch of the text occurs a second time nearby."""
    stretch = answered[start : start + length]
    for begin in range(max(0, start - _FARTHEST - length + 1), start + _FARTHEST + length):
        pairs = zip(stretch, answered[begin : begin + length], strict=False)
        if begin != start and sum(a == b for a, b in pairs) >= _ALIKE * length:
            return True
    return False


def _cut_regions(segments: Sequence[TimedText]) -> list[tuple[float, float]]:
    """Find the regions of cuts: between segments of different windows.

    There are none if the system does not report windows.
    """
    return [
        (min(before.end_s, after.start_s), max(before.end_s, after.start_s))
        for before, after in itertools.pairwise(segments)
        if before.window != after.window
    ]


# ---------------------------------------------------------------- score


@dataclasses.dataclass(frozen=True)
class LongFormResult:
    """Figures of a system on some recordings; counts are words unless they say otherwise."""

    cer: Rate  # intervals are of minutes
    wer: Rate  # its counts tell lost and added words
    lost_in_stretches: int
    repeated: int
    made_up: int
    unspoken: int  # characters of text outside speech

    @property
    def uncovered(self) -> float:
        """Return the percentage of words that are lost or repeated in stretches."""
        return 100.0 * (self.lost_in_stretches + self.repeated) / self.wer.counts.length


@dataclasses.dataclass(frozen=True)
class LongFormScore:
    """The figures of one system."""

    facts: SystemFacts
    overall: LongFormResult
    by_kind: dict[Kind, LongFormResult]
    rtfx: float
    errors: tuple[str, ...]  # calls that failed
    sentences: tuple[SentenceScore, ...]

    @property
    def name(self) -> str:
        """Return the system's name."""
        return self.facts.name


def score_long(
    facts: SystemFacts, calls: Sequence[TimedCall], recordings: Sequence[AnnotatedRecording]
) -> LongFormScore:
    """Score a system on annotated recordings.

    Args:
        facts: the system's facts.
        calls: one call per recording, in the order of `recordings`.
        recordings: the recordings with their reference texts.
    """
    by_kind: dict[Kind, list[RecordingScore]] = {}
    for recording, call in zip(recordings, calls, strict=True):
        segments = call.prediction.segments if call.prediction else ()
        outcome = score_recording(recording, segments)
        by_kind.setdefault(recording.kind, []).append(outcome)
    outcomes = list(itertools.chain(*by_kind.values()))
    return LongFormScore(
        facts=facts,
        overall=_long_form_result(outcomes),
        by_kind={kind: _long_form_result(some) for kind, some in by_kind.items()},
        rtfx=sum(call.duration_s for call in calls) / sum(call.latency_s for call in calls),
        errors=tuple(f"{call.file}: {call.error}" for call in calls if call.error is not None),
        sentences=tuple(sentence for outcome in outcomes for sentence in outcome.sentences),
    )


def _long_form_result(outcomes: Sequence[RecordingScore]) -> LongFormResult:
    sentences = [sentence for outcome in outcomes for sentence in outcome.sentences]
    names = ("lost_in_stretches", "repeated", "made_up", "unspoken")
    return LongFormResult(
        rate(_by_minute(sentences, "characters")),
        rate(_by_minute(sentences, "words")),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in names},
    )


def _by_minute(
    sentences: Sequence[SentenceScore], unit: Literal["words", "characters"]
) -> list[Counts]:
    """Sum edits by minutes of recordings; minutes without speech are left out."""
    minutes: dict[tuple[str, int], Counts] = {}
    for sentence in sentences:
        edits = minutes.get(sentence.minute, Counts()) + getattr(sentence, unit)
        minutes[sentence.minute] = edits
    return list(minutes.values())


# ---------------------------------------------------------------- gates


MAX_LOST_GAP = 0.5  # points of words lost or added, in the sentences beside our cuts
MAX_UNCOVERED = 0.5  # per cent of words lost or repeated in stretches, where people read clearly
CLEAR: tuple[Kind, ...] = ("reading", "passage")


def long_gates(scores: Sequence[LongFormScore], max_cer_gap: float) -> list[Check]:
    """Judge a run.

    Args:
        scores: the scores of the systems that transcribed everything.
        max_cer_gap: points of CER by which ours may be above faster-whisper's best.
    """
    by_name = {score.name: score for score in scores}
    checks = []
    for name, rivals in RIVALS.items():
        title = f"CER of {name} at most {max_cer_gap:g} points above faster-whisper's best"
        ours = by_name.get(name)
        run_rivals = [by_name[rival] for rival in rivals if rival in by_name]
        if ours is None or not run_rivals:
            missing = name if ours is None else "every rival of faster-whisper"
            checks.append(Check(title, None, f"{missing} is missing in this run"))
            continue
        best = min(run_rivals, key=lambda score: score.overall.cer.counts.errors)
        minutes = (_by_minute(score.sentences, "characters") for score in (ours, best))
        pairs = list(zip(*minutes, strict=True))
        checks.append(gap_gate(title, pairs, best.name, max_cer_gap, "minutes"))
        if name == OUR_DEFAULT:
            checks.append(_cut_gate(ours, best))
    if ours := by_name.get(OUR_DEFAULT):
        peers = [score for score in scores if score.name in LONG_THEIRS]
        checks += coverage_gates(ours, peers)
    return [*checks, all_answered({score.name: score.errors for score in scores})]


def _cut_gate(ours: LongFormScore, best: LongFormScore) -> Check:
    title = (
        f"words lost or added by {ours.name} beside its cuts at most {MAX_LOST_GAP:g} points above "
        "faster-whisper's best in the same sentences"
    )
    pairs = [
        (_lost_or_added(our_sentence.words), _lost_or_added(their_sentence.words))
        for our_sentence, their_sentence in zip(ours.sentences, best.sentences, strict=True)
        if our_sentence.at_cut
    ]
    if not pairs:
        return Check(title, None, "it cut nowhere")
    return gap_gate(title, pairs, best.name, MAX_LOST_GAP, "sentences")


def _lost_or_added(words: Counts) -> Counts:
    """Return the counts with substitutions as hits."""
    return Counts(0, words.deletions, words.insertions, words.hits + words.substitutions)


def coverage_gates(ours: LongFormScore, theirs: Sequence[LongFormScore]) -> list[Check]:
    """Compare lost and repeated words of read speech with the best of faster-whisper's systems.

    A stretch that is lost is lost on every run, so these are counts without an interval.
    """
    checks = []
    for kind in CLEAR:
        if kind not in ours.by_kind:
            continue
        uncovered = ours.by_kind[kind].uncovered
        peers = [(score.by_kind[kind].uncovered, score.name) for score in theirs]
        best, name = min(peers, default=(MAX_UNCOVERED, ""))
        title = (
            f"words of kind {kind} lost or repeated in stretches: at most {MAX_UNCOVERED:g} %, and "
            "no more than faster-whisper's best"
        )
        peer_detail = f"{best:.2f} % ({name})" if name else "not run"
        detail = f"{uncovered:.2f} %; faster-whisper's best: {peer_detail}"
        checks.append(Check(title, uncovered <= min(MAX_UNCOVERED, best), detail))
    return checks
