"""One checkpoint as Earshot computes it in several ways, each beside another over the same clips.

Everything runs in this process, on the device that is asked for, from engines that are there, FP16
and INT8, as `engine_of` in eval/accuracy/prepare.py names them; so it runs beside little but a GPU.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from build.clips import Clip
from eval.accuracy.data import SystemFacts, TimedCall
from eval.accuracy.load import driven
from eval.accuracy.normalize import DEFAULT
from eval.accuracy.ours import EarshotInProcess, greedy
from eval.accuracy.report import percent
from eval.accuracy.score import SetScore, gap_interval, score_system
from eval.config import Config, changed
from eval.corpora.find import find_clips
from eval.record import Result, Run, Section, Table, write_jsonl
from serve.contract.config import Precision
from serve.contract.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to compute a checkpoint."""

    precision: Precision
    beside: str  # the variant that its rate is held against
    runtime: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other than configured
    greedy: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every request


_INT8_KV = {"cross_kv": "int8", "encoder_precision": "full"}
_FULL = {"cross_kv": "full", "encoder_precision": "full"}
_FP8 = {"cross_kv": "int8", "encoder_precision": "fp8"}  # needs Hopper

VARIANTS = {
    "fp16": Variant("fp16", "fp16", _FULL),
    "int8": Variant("int8", "fp16", _FULL),
    "int8-kv8": Variant("int8", "fp16", _INT8_KV),
    "int8-kv8-fp8": Variant("int8", "int8-kv8", _FP8),
    "int8-words": Variant("int8", "int8", _FULL, options={"word_timestamps": True}),
    "fp16-greedy": Variant("fp16", "fp16", _FULL, greedy=True),
    "int8-greedy": Variant("int8", "fp16-greedy", _FULL, greedy=True),
    "int8-kv8-greedy": Variant("int8", "fp16-greedy", _INT8_KV, greedy=True),
    "int8-kv8-fp8-greedy": Variant("int8", "int8-kv8-greedy", _FP8, greedy=True),
}


@dataclasses.dataclass(frozen=True)
class Heard:
    """The answers of a variant to the clips."""

    calls: tuple[TimedCall, ...]
    score: SetScore
    took_s: float
    failed: int  # calls


def measure_variants(run: Run, *, variants: tuple[str, ...] | None) -> Result:
    """Let variants hear the clips of `eval.manifest`, keep what they say, and hold them together.

    The folder gets `<variant>.jsonl`, its calls.

    Args:
        run: of a config whose engines are there; it says the device, clips and calls at a time.
        variants: their names; None is all.

    Raises:
        ConfigError: a variant is not known, or an engine is missing or of another precision.
        EarshotError: a clip or the device is not to be had.
    """
    names = variants or tuple(VARIANTS)
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"unknown variant {name!r}; known: {', '.join(VARIANTS)}")
    of, folder = run.config.eval, run.folder
    drawn = find_clips(of.manifest, limit=of.limit, seed=of.seed, half=of.half)
    run.say(f"{of.manifest}: {drawn.summary}")
    results = {}
    for name in names:
        results[name] = _hear(name, VARIANTS[name], run.config, drawn.clips)
        write_jsonl(folder / f"{name}.jsonl", results[name].calls)
        run.say(
            f"{name}: CER {percent(results[name].score.overall.cer)}, {results[name].took_s:.0f} s"
        )
    sections = (Section("Variants", [_table(results)]),)
    scores = {name: result.score for name, result in results.items()}
    return Result(scores, sections=sections, about=drawn.summary)


def _configured(config: Config, variant: Variant) -> Config:
    config = greedy(config) if variant.greedy else config
    return changed(config, "runtime", **variant.runtime)


def _hear(name: str, variant: Variant, config: Config, clips: Sequence[Clip]) -> Heard:
    of = config.eval
    options = {"concurrency": of.concurrency, "tell_language": of.tell_language}
    system = EarshotInProcess(_configured(config, variant), variant.precision, **variant.options)
    began = time.perf_counter()
    with contextlib.closing(system):
        calls = driven(system, clips, f"{name:20}", phase="accuracy", **options)
    facts = SystemFacts("", name, dict(system.settings), 0.0, 0, len(calls))
    score = score_system(facts, calls, DEFAULT).sets["timed"]
    failed = sum(call.error is not None for call in calls)
    return Heard(tuple(calls), score, time.perf_counter() - began, failed)


def _table(results: Mapping[str, Heard]) -> Table:
    rows = [
        [
            name,
            percent(result.score.overall.cer),
            percent(result.score.overall.wer),
            f"{result.score.language_right} of {result.score.language_of}",
            *_beside(result, VARIANTS[name].beside, results),
            str(result.failed),
            f"{result.took_s:.0f}",
        ]
        for name, result in results.items()
    ]
    header = ["variant", "CER [95 %]", "WER [95 %]", "language right", "beside"]
    return Table([*header, "points of CER [95 %]", "equal texts", "failed", "s"], rows)


def _beside(result: Heard, name: str, results: Mapping[str, Heard]) -> list[str]:
    """Return whom it is held against, the paired gap, and how many texts are equal."""
    other = results.get(name)
    if other is None:
        return [name, "did not run", ""]
    mine, theirs = (list(each.score.by_clip.values()) for each in (result, other))
    low, high = gap_interval(mine, theirs)
    rates = [each.score.overall.cer.percent for each in (result, other)]
    texts = {call.file: call.text for call in other.calls}
    equal = sum(texts[call.file] == call.text for call in result.calls)
    if rates[0] is None or rates[1] is None:
        return [name, "no text", str(equal)]
    return [
        name,
        f"{rates[0] - rates[1]:+.2f} [{low:+.2f}, {high:+.2f}]",
        f"{equal} of {len(result.calls)}",
    ]
