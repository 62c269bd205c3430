"""`python -m eval run` and `report`: run clips x systems, keep the raw answers, and score them.

A run has a folder; a later run continues there.

run.json                     the configuration, the clips and the machine
clips.json                   every clip, with a hash of audio and reference
spelling.json                the checkpoint's spellings, for Whisper's English normaliser
predictions/                 the answers of every system; see eval/accuracy/predictions.py
logs/<system>.log            the output of the system's process
report.json, .md, .html      made from these alone
"""

import dataclasses
import datetime
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from build import hub
from eval.accuracy import systems
from eval.accuracy.normalize import Normalize, Spelling, normalizer, read_spelling
from eval.accuracy.passages import join_clips
from eval.accuracy.predictions import (
    CallsBySystem,
    ClipSet,
    ClipSets,
    Keys,
    LoadPhase,
    PredictionStore,
    RunFacts,
    TimedCall,
    clip_nearest_10_s,
    keys_of,
    read_calls,
)
from eval.accuracy.report import Report, compare_runs, result_of
from eval.accuracy.score import gates, score_system
from eval.accuracy.worker import measure_system, timed_phases
from eval.config import EvalConfig, EvaluationProduct, changed
from eval.corpora.find import FoundCorpus, find_clips
from eval.record import Result, Run, Say, load_line, read_json, verdict, write_json, write_jsonl
from serve.contract.codec import to_json
from serve.contract.errors import CheckpointError, ConfigError
from serve.contract.files import read_bytes
from serve.speech.audio import decode
from serve.speech.meter import AudioLimits

FORMAT_VERSION = 6  # of report.json
RUN_FILE = "run.json"
CLIPS_FILE = "clips.json"
SPELLING_FILE = "spelling.json"
_GO_ON = "run again, which goes on where it ended, or name the systems that did with --systems"


def evaluate(
    run: Run, *, without: tuple[str, ...], full: bool, again: bool, normalizer_name: str
) -> Result:
    """Run every configured system over every clip that it has not heard; report on all answers.

    Args:
        run: its `config.eval` names systems and clips. Its folder's answers under the same
            conditions are kept.
        without: systems that are left out.
        full: whether every system transcribes the held-out clips and is timed.
        again: whether earlier answers are dropped.
        normalizer_name: the name of the text normaliser.

    Raises:
        EarshotError: a system or something that it needs is missing, or a system failed; no clip
            can be read.
    """
    names = tuple(name for name in run.config.eval.systems if name not in without)
    run.config = changed(run.config, "eval", systems=names)
    if full:
        run.config = changed(run.config, "eval", heldout_systems=names, timed=names)
    config, folder = run.config, run.folder
    systems.check(names, config, (*config.eval.heldout_systems, *config.eval.timed))
    corpora = _find_corpora(config, run.say)
    clips = {name: corpus.clips for name, corpus in corpora.items()}
    durations_s = [clip.duration_s for clip in itertools.chain(*clips.values())]
    run.say(
        f"{len(durations_s)} clips, {sum(durations_s) / 60:.1f} minutes of audio; --limit N takes "
        "fewer clips, --without A,B fewer systems"
    )
    run.say(load_line())
    systems.prepare(names, config, run.config_path)
    # Every system gets the same threads, ours too.
    config = changed(config, "runtime", threads=config.eval.threads)
    keys = keys_of(clips)
    conditions = {name: systems.key_of(name, config) for name in names}
    nearest = clip_nearest_10_s(clips["timed"])
    facts = RunFacts(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_name=config.name,
        precision=config.build.precision,
        settings=config.eval,
        clips={name: len(corpus.clips) for name, corpus in corpora.items()},
        one_clip=nearest.file if nearest else None,
        one_clip_s=nearest.duration_s if nearest else None,
        machine=run.machine,
        sources={name: corpus.summary for name, corpus in corpora.items()},
        unreadable={name: corpus.unreadable for name, corpus in corpora.items()},
    )
    write_json(folder / RUN_FILE, facts)
    write_json(folder / CLIPS_FILE, keys)
    write_json(folder / SPELLING_FILE, _spelling(config))
    transcribe_remaining(conditions, config, clips, keys, folder, run.say, again=again)
    return kept_result(folder, (), normalizer_name)


def report(
    run: Run, *, a: Path, b: Path | None, names: tuple[str, ...], normalizer_name: str, output: Path
) -> Result:
    """Score a kept run again and write its report; or show two runs side by side.

    Args:
        run: receives the path of the report.
        a: the folder of a run.
        b: the folder of another one.
        names: the systems to score; () is all of the run.
        normalizer_name: the name of the text normaliser.
        output: the folder of two runs' page.

    Raises:
        ConfigError: a folder holds no run, a system did not finish, or two runs share no system.
        FileError: a report cannot be read or written.
    """
    run.path = (a if b is None else output) / f"{run.command}.json"
    if b is None:
        return kept_result(a, names, normalizer_name)
    return compare_runs(*(score(folder, names, normalizer_name)[0] for folder in (a, b)))


def kept_result(folder: Path, names: tuple[str, ...], normalizer_name: str) -> Result:
    """Score a run, write report.json beside its predictions, and return the result; as `score`."""
    report, calls, normalize = score(folder, names, normalizer_name)
    head = {"format_version": FORMAT_VERSION, "verdict": verdict(report.gates)}
    write_json(folder / "report.json", {**head, **vars(report)})
    return result_of(report, calls, normalize)


Scored = tuple[Report, CallsBySystem, Normalize]
"""A report, the calls that it is of, and the normaliser that texts were compared under."""


def score(folder: Path, names: tuple[str, ...], normalizer_name: str) -> Scored:
    """Score a run's predictions.

    Args:
        folder: the run's folder.
        names: the systems to score; () is all, in the order that they ran.
        normalizer_name: the name of the text normaliser.

    Raises:
        ConfigError: a file is missing or damaged, or a system did not hear all its clips; the
            message says what to do.
    """
    facts = read_json(folder / RUN_FILE, RunFacts, "a run")
    keys = read_json(folder / CLIPS_FILE, Keys, "the clips of a run")
    spelling = read_json(folder / SPELLING_FILE, Spelling, "spellings")
    normalize, settings = normalizer(normalizer_name, spelling), facts.settings
    calls, scores = dict[str, list[TimedCall]](), []
    for name in dict.fromkeys(names or settings.systems):
        if name not in settings.systems:
            known = ", ".join(settings.systems)
            raise ConfigError(f"the run in {folder} did not include {name}; it had {known}")
        store = PredictionStore(folder, name)
        system_facts = store.facts()
        expected: Keys = keys if name in settings.heldout_systems else {"timed": keys["timed"]}
        own = store.scored_calls(expected)
        missing = sum(map(len, expected.values())) - len(own)
        if system_facts is None or missing:
            raise ConfigError(f"{name} did not finish in {folder}: {missing} clips left; {_GO_ON}")
        calls[name] = own + (read_calls(store.timed_path) if name in settings.timed else [])
        scores.append(score_system(system_facts, calls[name], normalize))
    # The configured groups decide nothing of other clips.
    groups = {call.group for some in calls.values() for call in some}
    deciding = tuple(group for group in settings.gate_groups if group in groups)
    checks = gates(scores, facts.precision, settings, deciding)
    return Report(facts, normalizer_name, tuple(scores), tuple(checks), deciding), calls, normalize


# ---------------------------------------------------------------- transcribe


def transcribe_remaining(
    conditions: Mapping[str, str],
    config: EvaluationProduct,
    clips: ClipSets,
    keys: Keys,
    folder: Path,
    say: Say,
    *,
    again: bool,
) -> None:
    """Transcribe the clips that systems have not transcribed yet, and keep each answer.

    Args:
        conditions: everything that decides the answers of a system, by the system's name.
            Answers under other conditions are dropped.
        config: `eval` says how many calls at a time, the CPU threads, and the systems to time.
        clips: all that there are.
        keys: the clips' hashes.
        folder: the folder of the answers; see `eval.accuracy.predictions`.
        say: gets a line if answers are dropped, or if no work is left.
        again: whether all former answers are dropped.

    Raises:
        EarshotError: a system cannot be opened, or ended early.
    """
    settings, work = config.eval, dict[PredictionStore, list[LoadPhase]]()
    timing = "\n".join([f"{settings.concurrency} {settings.repeats}", *keys["timed"].values()])
    timed_key = hashlib.sha256(timing.encode()).hexdigest()[:16]
    for name, condition in conditions.items():
        store = PredictionStore(folder, name)
        if store.resume(condition, again=again):
            say(f"{name}: its answers were given under other settings, so it hears all again")
        if phases := _remaining_phases(store, settings, clips, keys, timed_key):
            work[store] = phases
    if not work:
        say("nothing is left to be heard")
    total = sum(len(p.clips) * p.repeats for p in itertools.chain(*work.values()))
    # One bar for all systems.
    with tqdm(total=total, unit="clip", smoothing=0.05, disable=not work) as bar:

        def run_system(store: PredictionStore, phases: Sequence[LoadPhase]) -> None:
            former, timed = store.facts(), list[TimedCall]()
            store.facts_path.unlink(missing_ok=True)
            with store.scored_path.open("a", encoding="utf-8", buffering=1) as scored:

                def keep(call: TimedCall) -> None:
                    if call.phase == "accuracy":
                        call = dataclasses.replace(call, key=keys[call.clip_set][call.file])
                        scored.write(to_json(call) + "\n")
                    else:
                        timed.append(dataclasses.replace(call, key=timed_key))
                    bar.update()

                log = folder / "logs" / f"{store.name}.log"
                facts = measure_system(
                    store.name,
                    config,
                    phases,
                    open_system=systems.open_system,
                    on_call=keep,
                    log=log,
                )
            if timed:
                write_jsonl(store.timed_path, timed)
            # A part of the clips may need less memory than all of them.
            peaks = [known.peak_memory_bytes for known in (facts, former) if known]
            write_json(store.facts_path, dataclasses.replace(facts, peak_memory_bytes=max(peaks)))

        for store, phases in work.items():
            bar.set_description(f"{store.name:31}")
            run_system(store, phases)


def _remaining_phases(
    store: PredictionStore, settings: EvalConfig, clips: ClipSets, keys: Keys, timed_key: str
) -> list[LoadPhase]:
    """List the phases that a system has still to run: clips without an answer, and its times."""
    done = {(call.clip_set, call.file) for call in store.scored_calls(keys)}
    phases = list[LoadPhase]()
    own: ClipSets = clips if store.name in settings.heldout_systems else {"timed": clips["timed"]}
    for clip_set, some in own.items():
        remaining = [clip for clip in some if (clip_set, clip.file) not in done]
        if remaining:
            phases.append(LoadPhase("accuracy", remaining, settings.concurrency, clip_set=clip_set))
    timing_keys = {call.key for call in read_calls(store.timed_path)}
    if store.name in settings.timed and timing_keys != {timed_key}:
        phases += timed_phases(clips["timed"], settings)
    if not phases and store.facts() is None:  # it ended after its last answer, before its facts
        phases = [LoadPhase("accuracy", clips["timed"][-1:], 1)]
    return phases


def _find_corpora(config: EvaluationProduct, say: Say) -> dict[ClipSet, FoundCorpus]:
    """Find both sets. The held-out clips come first: they are many, and warm a system up."""
    settings, limits = config.eval, AudioLimits(config.transcriber.max_audio_s)

    def read(path: Path) -> None:
        for _ in decode(read_bytes(path), limits):
            pass

    def find(place: str, limit: int) -> FoundCorpus:
        corpus = find_clips(
            place,
            limit=limit,
            seed=settings.seed,
            language=settings.language,
            half=settings.half,
            read=read,
        )
        corpus = dataclasses.replace(corpus, summary=f"{place}: {corpus.summary}")
        say(corpus.summary)
        for file, reason in corpus.unreadable.items():
            say(f"cannot be read, so no system is given it: {file}: {reason}")
        return corpus

    timed = find(settings.manifest, settings.timed_limit or settings.limit)
    if not settings.heldout:
        return {"timed": timed}
    heldout = find(settings.heldout, settings.limit)
    clips, summary = heldout.clips, heldout.summary
    if settings.heldout == settings.manifest:  # the timed clips are scored already
        files = {clip.file for clip in timed.clips}
        clips = [clip for clip in clips if clip.file not in files]
        if not clips:
            say("every clip was drawn to be timed, so none is held out")
            return {"timed": timed}
        summary += f"; {len(clips)} of these are not timed"
    if settings.join_s:
        clips = join_clips(clips, settings.join_s)
        summary += f"; joined to {len(clips)} passages of at most {settings.join_s:g} s by speaker"
        say(summary)
    return {"heldout": FoundCorpus(clips, summary, heldout.unreadable), "timed": timed}


def _spelling(config: EvaluationProduct) -> Spelling:
    """Read the checkpoint's spellings; none where it is not at hand or, as OpenAI's, has none."""
    try:
        folder = hub.checkpoint_folder(config.build.checkpoint, with_weights=False).path
        return read_spelling(folder)
    except CheckpointError:
        return Spelling()
