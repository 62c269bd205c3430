"""`python -m eval long`: transcribe long recordings with several systems, and score them."""

from collections.abc import Sequence
from pathlib import Path

from build.clips import Clip, load_clips
from eval.accuracy.normalize import DEFAULT
from eval.accuracy.predictions import ClipSets, Keys, PredictionStore, keys_of
from eval.accuracy.report import percent
from eval.accuracy.run import transcribe_remaining
from eval.accuracy.systems import check, prepare
from eval.config import EvalConfig, EvaluationProduct, changed
from eval.figures import rate_chart
from eval.long import NAMES
from eval.long.compose import KINDS, MANIFEST, AnnotatedRecording, compose, read_manifest
from eval.long.score import BLOCK_S, NEAR_CUT_S, RUN, TOUCH_S, LongFormScore, long_gates, score_long
from eval.long.without_speech import measure_without_speech
from eval.record import Figure, ReportSection, Result, Run, Table, Text, facts

PASSAGES = "tests/data/human/long.jsonl"  # beside the bundled clips of people
_TIMEOUT_S = 7200.0  # for one recording of 20 minutes, on a machine that has other work
_RULES = Path(__file__).parents[1] / "templates" / "long_rules.txt"


def long(
    run: Run,
    *,
    systems: tuple[str, ...] | None,
    minutes: float | None,
    seed: int,
    again: bool,
    without_speech: bool,
) -> Result:
    """Transcribe the recordings that systems have not transcribed yet; score all answers.

    Args:
        run: its config says the speech, the CPU threads of every system, and a gate's limit.
        systems: their names; None is all.
        minutes: the least minutes of composed recordings; None: each kind once.
        seed: the seed of the recordings.
        again: whether the former answers of these systems are dropped.
        without_speech: whether to use short clips without speech instead.

    Raises:
        EarshotError: a system, or something that it needs, is missing or failed.
    """
    if without_speech:
        return measure_without_speech(run, systems=systems, seed=seed, again=again)
    names, config = systems or NAMES, _fair(run.config)
    check(names, config)
    prepare(names, config, run.config_path)
    folder = compose(_speech(config), minutes, seed)
    recordings = read_manifest(folder / MANIFEST)
    sets: ClipSets = {"timed": load_clips(folder / MANIFEST)}
    keys = keys_of(sets)
    conditions = dict.fromkeys(names, f"{config.name}, {config.eval.threads} threads")
    transcribe_remaining(conditions, config, sets, keys, run.folder, run.say, again=again)
    all_names = tuple(dict.fromkeys((*NAMES, *names)))
    scores, unfinished = _scored(run.folder, all_names, recordings, keys)
    return result_of(run, recordings, scores, unfinished)


def _fair(config: EvaluationProduct) -> EvaluationProduct:
    """Configure one recording at a time, equal threads, and a timeout for the longest one."""
    config = changed(config, "eval", timed=(), heldout_systems=(), concurrency=1)
    config = changed(config, "runtime", threads=config.eval.threads)
    return changed(config, "transcriber", request_timeout_s=_TIMEOUT_S)


def _speech(config: EvaluationProduct) -> list[Clip]:
    """Return the clips, of the configured half, from which recordings are composed."""
    manifest, heldout, half = config.eval.manifest, config.eval.heldout, config.eval.half
    passages = PASSAGES if manifest == EvalConfig.manifest else ""
    places = dict.fromkeys((manifest, heldout, passages))  # some may be equal
    clips = [clip for place in places if place for clip in load_clips(place)]
    return [clip for clip in clips if not half or clip.half in ("", half)]


def _scored(
    folder: Path, names: Sequence[str], recordings: Sequence[AnnotatedRecording], keys: Keys
) -> tuple[list[LongFormScore], list[str]]:
    """Score all systems that have finished; also return the names of the others."""
    scores, unfinished = [], []
    for name in names:
        kept = PredictionStore(folder, name)
        calls = {call.file: call for call in kept.scored_calls(keys)}
        measured = kept.facts()
        if measured is not None and len(calls) == len(recordings):
            in_order = [calls[recording.file] for recording in recordings]
            scores.append(score_long(measured, in_order, recordings))
        elif calls:
            unfinished.append(name)
    return scores, unfinished


# ---------------------------------------------------------------- report


def result_of(
    run: Run,
    recordings: Sequence[AnnotatedRecording],
    scores: Sequence[LongFormScore],
    unfinished: Sequence[str],
) -> Result:
    """Return the result of scored recordings."""
    systems = [{**vars(score), "sentences": None} for score in scores]
    total_s = sum(recording.duration for recording in recordings)
    sentences = [sentence for recording in recordings for sentence in recording.sentences]
    spoken_s = sum(sentence.end_s - sentence.start_s for sentence in sentences)
    words = sum(len(sentence.text.split()) for sentence in sentences)
    notes = [f"`{name}` has not heard everything yet; run again." for name in unfinished]
    settings = [facts(score.name, score.facts.settings, "closed") for score in scores]
    values = {"run": RUN, "block_s": BLOCK_S, "touch_s": TOUCH_S, "near_cut_s": NEAR_CUT_S}
    rules = _RULES.read_text(encoding="utf-8").format(**values, normalizer=DEFAULT).splitlines()
    return Result(
        {"systems": systems, "unfinished": unfinished},
        tuple(long_gates(scores, run.config.eval.max_cer_gap_faster_whisper)),
        (
            _accuracy(scores),
            _by_kind(recordings, scores),
            ReportSection("Systems", [Text("", items=rules), *settings], printed=False),
        ),
        about=f"{len(recordings)} recordings, {total_s / 60:.1f} minutes, of which "
        f"{spoken_s / 60:.1f} are speech ({words:,} words); {run.config.eval.threads} CPU threads "
        "for every system.",
        notes=(Text("", items=notes),) if notes else (),
    )


_COUNTS = "Counts are words; `no speech` counts characters of text where nobody speaks."


def _accuracy(scores: Sequence[LongFormScore]) -> ReportSection:
    header = (
        *("system", "CER [95 %]", "WER [95 %]", "lost", "in a row", "added", "repeated"),
        *("made up", "no speech", "RTFx"),
    )
    rows = []
    for score in scores:
        figures, counts = score.overall, score.overall.wer.counts
        numbers = (
            *(counts.deletions, figures.lost_in_stretches, counts.insertions),
            *(figures.repeated, figures.made_up, figures.unspoken),
        )
        rates = percent(figures.cer), percent(figures.wer)
        rows.append((score.name, *rates, *map(str, numbers), f"{score.rtfx:.1f}"))
    charts = [
        rate_chart("CER, %", {score.name: score.overall.cer for score in scores}),
        rate_chart("WER, %", {score.name: score.overall.wer for score in scores}),
    ]
    table = Table(header, rows, note=_COUNTS)
    return ReportSection("Accuracy", [Figure([chart for chart in charts if chart]), table])


def _by_kind(
    recordings: Sequence[AnnotatedRecording], scores: Sequence[LongFormScore]
) -> ReportSection:
    kinds = list(dict.fromkeys(recording.kind for recording in recordings))
    rows = [(score.name, *(percent(score.by_kind[kind].cer) for kind in kinds)) for score in scores]
    note = "CER. " + "; ".join(f"{kind}: {KINDS[kind]}" for kind in kinds) + "."
    return ReportSection("By kind of recording", [Table(("system", *kinds), rows, note=note)])
