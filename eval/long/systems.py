"""The systems that recordings are given to, and their answers; `eval.long` lists them."""

import dataclasses
from pathlib import Path
from typing import Any

from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.predictions import Kept, Keys, TimedCall
from eval.accuracy.systems import Spec, check, fair_options, faster_whisper, in_process, prepare
from eval.accuracy.worker import TranscriptionSystem, measure_system
from eval.config import EvaluationProduct
from eval.long import OURS, THEIRS, THEIRS_BATCHED
from eval.record import Run, Say, write_json

_COMPUTE_TYPE = "float32"  # which the library keeps of a converted checkpoint if told nothing


def specs(config: EvaluationProduct) -> dict[str, Spec]:
    """Return every system by name."""

    def theirs(options: dict[str, Any], *, batched: bool = False) -> Spec:
        def suppressing() -> dict[str, Any]:
            return {"suppress_tokens": fair_options(config)["suppress_tokens"], **options}

        return faster_whisper(config, _COMPUTE_TYPE, suppressing, batched=batched)

    precision = config.build.precision
    return {
        **{name: in_process(config, precision, **options) for name, options in OURS.items()},
        **{name: theirs(options) for name, options in THEIRS.items()},
        **{name: theirs(options, batched=True) for name, options in THEIRS_BATCHED.items()},
    }


def prepare_names(names: tuple[str, ...], run: Run) -> None:
    """Refuse systems that cannot run, and build engines and conversions that the others need."""
    known = specs(run.config)
    check(names, known)
    prepare([known[name] for name in names], run.config, run.config_path)


def open_system(name: str, config: EvaluationProduct) -> TranscriptionSystem:
    """Open a system; it is ready when this returns."""
    return specs(config)[name].open()


def listen(
    name: str,
    config: EvaluationProduct,
    clips: list[Clip],
    keys: Keys,
    folder: Path,
    say: Say,
    *,
    again: bool,
) -> None:
    """Let one system hear the clips that it has not heard yet, and keep each answer.

    Args:
        name: of the system.
        config: `eval` says how many calls at a time, and the CPU threads.
        clips: all that there are.
        keys: of the clips.
        folder: of the answers; see `eval.accuracy.predictions`.
        say: gets a line if answers under other conditions are dropped.
        again: whether all former answers are dropped.

    Raises:
        EarshotError: the system cannot be opened, or ended early.
    """
    kept, conditions = Kept(folder, name), f"{config.name}, {config.eval.threads} threads"
    if kept.go_on(conditions, again=again):
        say(f"{name}: its former answers were under other settings, so it hears all again")
    left = kept.left({"timed": clips}, keys).get("timed", [])
    if not left and kept.facts() is None:
        left = clips[-1:]  # it died after its last answer, before its facts were known
    if not left:
        return
    total_s = sum(clip.duration_s for clip in clips)
    bar = tqdm(
        total=total_s / 60,
        initial=(total_s - sum(clip.duration_s for clip in left)) / 60,
        desc=f"{name:36}",
        bar_format="{l_bar}{bar}| {n:.1f} of {total:.1f} minutes [{elapsed}<{remaining}]",
    )
    with bar, kept.appended() as keep:

        def heard(call: TimedCall) -> None:
            keep(dataclasses.replace(call, key=keys["timed"][call.file]))
            bar.update(call.duration_s / 60)

        facts = measure_system(
            name,
            config,
            {"timed": left},
            run_id=conditions,
            open_system=open_system,
            on_call=heard,
            log=folder / "logs" / f"{name}.log",
        )
    write_json(kept.facts_path, facts)
