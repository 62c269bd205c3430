"""Figures that say how likely words are right, held against the truth, and the fit that makes them.

The engine hears both halves of the clips, by each beam. A word that it heard is right where jiwer's
alignment finds it in the reference. A logistic of its `probability` and its segment's `avg_logprob`
is fitted to the words of one half, `choose`; all figures are of the other, `report`.

beam-<N>.jsonl    words that were heard
fit.json          what `build.confidence` may name
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jiwer
import numpy as np
from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.normalize import DEFAULT, Normalize, normalizer
from eval.accuracy.prepare import engine_of
from eval.accuracy.reliability import Bin, Reliability, bins, fit_logistic, reliability
from eval.config import Config
from eval.corpora.find import find_clips
from eval.record import Check, Part, Result, Run, Section, Table, Text, write_json, write_jsonl
from serve.contract.engine import Confidence, open_engine
from serve.contract.errors import EarshotError
from serve.contract.files import read_bytes
from serve.contract.messages import Request, Transcript
from serve.speech.confidence import confidence_of, log_odds
from serve.speech.word_parts import SPACELESS
from serve.transcriber.open import open_transcriber

HALVES = ("choose", "report")
EVERY = "all"
MOST_ECE = 0.05  # of words that were not fitted to
DECIDING = 1_000  # words; of fewer the measures are a matter of chance
_FEWEST = 50  # words of a language that has a row


@dataclasses.dataclass(frozen=True)
class HeardWord:
    """A word that was heard."""

    file: str
    half: str
    language: str  # of the reference; "" = unknown
    word: str
    probability: float
    avg_logprob: float  # of its segment
    confidence: float | None  # as the engine says, if it does
    right: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of the words of a language, or of all."""

    beam_size: int
    figure: str
    language: str
    reliability: Reliability


@dataclasses.dataclass(frozen=True)
class Figures:
    """All that was found."""

    fit: Confidence
    rows: tuple[Row, ...]
    bins: dict[str, dict[str, list[Bin]]]  # by beam, and by figure


def measure_confidence(run: Run, *, beams: tuple[int, ...]) -> Result:
    """Let the engine hear both halves, fit to one, and judge by the other.

    Args:
        run: of a config whose engine is there, and can time words.
        beams: each a beam size.

    Raises:
        EarshotError: a clip or the engine is not to be had, a clip cannot be heard, or too few
            words are right or wrong.
    """
    of, config = run.config.eval, run.config
    engine = engine_of(config, config.build.precision)
    source = open_engine(engine).manifest.source.id
    drawn = find_clips(of.manifest, limit=of.limit, seed=of.seed)
    run.say(drawn.summary)
    words = dict[int, list[HeardWord]]()
    for beam, answers in _heard(config, engine, drawn.clips, beams):
        words[beam] = list(judged(drawn.clips, answers, normalizer(DEFAULT)))
        write_jsonl(run.folder / f"beam-{beam}.jsonl", words[beam])
    figures = figures_of(words, source)
    write_json(run.folder / "fit.json", figures.fit)
    sections = (Section("Confidence", report_of(figures)),)
    return Result(figures, checks_of(figures), sections, about=drawn.summary)


def _heard(
    config: Config, engine: str, clips: Sequence[Clip], beams: Sequence[int]
) -> Iterable[tuple[int, list[Transcript]]]:
    """Yield each beam, and the answers to all clips by it."""

    def hear(beam: int, clip: Clip) -> Transcript:
        language = clip.language if config.eval.tell_language else None
        request = Request(read_bytes(clip.path), language=language, word_timestamps=True)
        return transcriber.transcribe(dataclasses.replace(request, beam_size=beam, best_of=beam))

    with (
        open_transcriber(config, engine) as transcriber,
        ThreadPoolExecutor(config.eval.concurrency) as pool,
    ):
        for beam in beams:
            answers = pool.map(functools.partial(hear, beam), clips)
            yield beam, list(tqdm(answers, f"beam {beam}", len(clips), unit="clip"))


def judged(
    clips: Sequence[Clip], answers: Sequence[Transcript], normalize: Normalize
) -> Iterable[HeardWord]:
    """Yield the words of answers, and whether each is right; what is but marks is no word.

    Clips that are of no half are of both in turn.
    """
    for number, (clip, answer) in enumerate(zip(clips, answers, strict=True)):
        heard_words = [
            (word, segment) for segment in answer.segments for word in segment.words or ()
        ]
        texts = [word.word for word, _ in heard_words]
        verdicts = right_words(clip.text, texts, clip.language, normalize)
        for (word, segment), right in zip(heard_words, verdicts, strict=True):
            if right is not None and segment.avg_logprob is not None:
                yield HeardWord(
                    file=clip.file,
                    half=clip.half or HALVES[number % 2],
                    language=clip.language or "",
                    word=word.word,
                    probability=word.probability,
                    avg_logprob=segment.avg_logprob,
                    confidence=word.confidence,
                    right=right,
                )


def right_words(
    reference: str, words: Sequence[str], language: str | None, normalize: Normalize
) -> list[bool | None]:
    """Tell which words stand in a reference where they were heard; None: there is nothing in it.

    Every word of either is normalised by itself; where a language has no spaces its characters are
    compared. A word that becomes several is right where all of them are.
    """

    def parts(word: str) -> list[str]:
        text = normalize(word, language)
        return list(text.replace(" ", "")) if language in SPACELESS else text.split()

    hypothesis = [(part, number) for number, word in enumerate(words) for part in parts(word)]
    reference_parts = [part for word in reference.split() for part in parts(word)]
    verdicts: list[bool | None] = [None] * len(words)
    for _, number in hypothesis:
        verdicts[number] = True
    hits = _hits(reference_parts, [part for part, _ in hypothesis])
    for place, (_, number) in enumerate(hypothesis):
        verdicts[number] = bool(verdicts[number]) and place in hits
    return verdicts


def _hits(reference: Sequence[str], hypothesis: Sequence[str]) -> set[int]:
    """Return the places of a hypothesis that stand where they were said."""
    if not reference or not hypothesis:
        return set()
    aligned = jiwer.process_words([" ".join(reference)], [" ".join(hypothesis)]).alignments[0]
    return {
        place
        for part in aligned
        if part.type == "equal"
        for place in range(part.hyp_start_idx, part.hyp_end_idx)
    }


def fitted(words: Sequence[HeardWord], source: str) -> Confidence:
    """Fit how likely words are right to some.

    Raises:
        EarshotError: as `fit_logistic`.
    """
    features = np.array([(log_odds(word.probability), word.avg_logprob) for word in words])
    weights = fit_logistic(features.reshape(-1, 2), [word.right for word in words])
    intercept, probability, avg_logprob = (round(weight, 4) for weight in weights)
    return Confidence(
        fit="logistic",
        intercept=intercept,
        probability=probability,
        avg_logprob=avg_logprob,
        source=source,
        clips=len({word.file for word in words}),
        words=len(words),
        languages=tuple(sorted({word.language for word in words if word.language})),
    )


def figures_of(words: dict[int, list[HeardWord]], source: str) -> Figures:
    """Fit to the words of one half that were heard by any beam, and judge by the other.

    Args:
        words: of both halves, by beam.
        source: id of the checkpoint that heard them.

    Raises:
        EarshotError: as `fit_logistic`; or no word of the other half was heard.
    """
    chosen = [word for some in words.values() for word in some if word.half == "choose"]
    fit = fitted(chosen, source)
    fits = {"fitted": fit}
    most, _ = collections.Counter(word.language for word in chosen).most_common(1)[0]
    if len(fit.languages) > 1:
        alone = [word for word in chosen if word.language == most]
        fits[f"fitted to {most or 'unknown'}"] = fitted(alone, source)
    rows, by_bin = list[Row](), dict[str, dict[str, list[Bin]]]()
    for beam, every in words.items():
        some = [word for word in every if word.half == "report"]
        if not some:
            raise EarshotError("no word of the half 'report' was heard; expected speech in it")
        figures = _figures(some, fits)
        rows += _rows(beam, some, figures)
        right = [word.right for word in some]
        by_bin[str(beam)] = {name: bins(values, right) for name, values in figures.items()}
    return Figures(fit, tuple(rows), by_bin)


def _figures(words: Sequence[HeardWord], fits: dict[str, Confidence]) -> dict[str, list[float]]:
    """Return each figure of all words, by its name."""
    figures = {"probability": [word.probability for word in words]}
    own = [word.confidence for word in words if word.confidence is not None]
    if len(own) == len(words):
        figures["confidence"] = own
    for name, fit in fits.items():
        figures[name] = [confidence_of(fit, word.probability, word.avg_logprob) for word in words]
    return figures


def _rows(beam: int, words: Sequence[HeardWord], figures: dict[str, list[float]]) -> list[Row]:
    counts = collections.Counter(word.language for word in words)
    languages = [name for name in sorted(counts) if name and counts[name] >= _FEWEST]
    rows = list[Row]()
    for language in [EVERY, *languages]:
        places = [i for i, word in enumerate(words) if language in (EVERY, word.language)]
        right = [words[i].right for i in places]
        rows += [
            Row(beam, name, language, reliability([values[i] for i in places], right))
            for name, values in figures.items()
        ]
    return rows


def checks_of(figures: Figures) -> tuple[Check, ...]:
    """Check what must hold of all words that were not fitted to; few decide nothing."""
    whole = {(row.beam_size, row.figure): row for row in figures.rows if row.language == EVERY}
    checks = list[Check]()
    for beam in dict.fromkeys(beam for beam, _ in whole):
        after = whole[beam, "fitted"].reliability
        before = whole[beam, "probability"].reliability
        detail = f"{before.ece:.3f} before, {after.ece:.3f} after"
        near = f"with a beam of {beam} confidence is within {MOST_ECE} of the truth"
        enough = after.words >= DECIDING
        checks.append(Check(near, after.ece <= MOST_ECE if enough else None, detail))
        better = f"with a beam of {beam} confidence has a smaller Brier score than probability"
        detail = f"{before.brier:.4f} before, {after.brier:.4f} after"
        checks.append(Check(better, after.brier < before.brier if enough else None, detail))
    return tuple(checks)


def report_of(figures: Figures) -> list[Part]:
    """Return the fit, the figures, and how many words are right of those that say as much."""
    parts: list[Part] = [Text(f"fit: {_fit(figures.fit)}")]
    parts.append(Table(_HEADER, [_cells(row) for row in figures.rows]))
    for beam, by_figure in figures.bins.items():
        for name in ("probability", "fitted"):
            rows = [
                [f"{group.low:.2f} to {group.high:.2f}", str(group.words)]
                + [f"{share:.3f}" for share in (group.said, group.right)]
                for group in by_figure[name]
            ]
            header = [f"beam {beam}, {name}", "words", "says", "are right"]
            parts.append(Table(header, rows, f"Beam {beam}, {name}"))
    return parts


def _fit(fit: Confidence) -> str:
    return (
        f"{fit.intercept:+.3f} {fit.probability:+.3f} log-odds of the probability "
        f"{fit.avg_logprob:+.3f} avg_logprob; {fit.words} words of {fit.clips} clips, "
        f"{', '.join(fit.languages)}"
    )


_HEADER = ("beam, words, figure", "words", "right", "says", "ECE", "adaptive", "Brier", "AUROC")


def _cells(row: Row) -> list[str]:
    figures = row.reliability
    shares = (figures.right, figures.said, figures.ece, figures.adaptive_ece)
    return [
        f"{row.beam_size}, {row.language}, {row.figure}",
        str(figures.words),
        *(f"{share:.3f}" for share in shares),
        f"{figures.brier:.4f}",
        "" if figures.auroc is None else f"{figures.auroc:.3f}",
    ]
