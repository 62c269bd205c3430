"""Which transcripts can be trusted without a reference? Those that two passes agree on.

The engine hears the clips as configured, and once more greedily, or another engine does. Where
there are references they say how right what is selected is, beside as many of the transcripts that
the first pass is surest of.

transcripts.jsonl   what was heard, the most alike first: a manifest, once it is filtered
failed.jsonl        clips that were not, and why
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.ours import greedy
from eval.accuracy.report import percent
from eval.accuracy.trust import (
    EVERY,
    WAYS,
    Pair,
    Point,
    Whole,
    checks_of,
    curve,
    is_trusted,
    pair_of,
    steps,
    ways_of,
)
from eval.config import Config
from eval.corpora.find import Found, duration_s, find_clips
from eval.figures import line_chart
from eval.record import Figure, Part, Result, Run, Section, Table, Text, write_jsonl
from serve.contract.engine import open_engine
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.files import read_bytes
from serve.contract.messages import Request, Transcript
from serve.transcriber.open import open_transcriber


@dataclasses.dataclass(frozen=True)
class Figures:
    """All that was found."""

    whole: Whole
    failed: int  # clips
    trusted: int
    silences: int  # clips in which neither pass heard a word
    silences_right: int | None  # in which nobody speaks; None: there are no references
    points: tuple[Point, ...]


def measure_agreement(run: Run, *, other: str, threshold: float) -> Result:
    """Let two passes hear the clips of `eval.manifest`, and select what they agree on.

    Args:
        run: of a config whose engine is there.
        other: folder of the engine of the second pass; "" is the same one, greedily.
        threshold: % in which two texts may differ that are trusted.

    Raises:
        ConfigError: both passes would be the same.
        EarshotError: the clips or an engine are not to be had, or every clip failed.
    """
    of, passes = run.config.eval, passes_of(run.config, other)
    for _, engine in passes:
        open_engine(engine)  # what is missing is told before the first pass, not after it
    drawn = find_clips(
        of.manifest,
        limit=of.limit,
        seed=of.seed,
        half=of.half,
        read=duration_s,
        need_references=False,
    )
    run.say(drawn.summary)
    first, second = (_heard(*one, drawn.clips) for one in passes)
    pairs, failed = paired(drawn, first, second)
    whole = Whole(
        len(drawn.clips) + len(drawn.unreadable), sum(clip.duration_s for clip in drawn.clips)
    )
    figures = figures_of(pairs, len(failed), whole, threshold)
    write_jsonl(run.folder / "transcripts.jsonl", [line_of(pair, threshold) for pair in pairs])
    write_jsonl(
        run.folder / "failed.jsonl",
        [{"file": file, "error": error} for file, error in failed.items()],
    )
    parts: list[Part] = list(report_of(figures, threshold))
    if drawn.references:
        curves = {way: steps(pairs, whole, way) for way in ways_of(pairs)}
        label = "CER of the selected transcripts over their share of the clips"
        chart = line_chart("CER of the selected, %", label, "selected, % of the clips", curves)
        parts.insert(0, Figure([chart], legend=""))
    sections = (Section("Agreement", parts),)
    return Result(figures, checks_of(pairs, threshold), sections, about=drawn.summary)


def passes_of(config: Config, other: str) -> tuple[tuple[Config, str], tuple[Config, str]]:
    """Return config and engine of both passes.

    Raises:
        ConfigError: these are the same.
    """
    if not other and config.transcriber.beam_size == 1:
        raise ConfigError(
            "transcriber.beam_size is 1, so a greedy pass would say the same again; expected more, "
            "or another engine as --other"
        )
    if other and Path(other).resolve() == Path(config.engine).resolve():
        raise ConfigError(f"--other {other} is the config's own engine; expected another one")
    second = (config, other) if other else (greedy(config), config.engine)
    return (config, config.engine), second


def _heard(config: Config, engine: str, clips: Sequence[Clip]) -> list[Transcript | EarshotError]:
    """Return what an engine hears of each clip, or why it hears nothing."""

    def hear(clip: Clip) -> Transcript | EarshotError:
        language = clip.language if config.eval.tell_language else None
        try:
            audio = read_bytes(clip.path)
            return transcriber.transcribe(
                Request(audio, language=language, try_word_timestamps=True)
            )
        except EarshotError as error:
            return error

    title = f"{engine}, a beam of {config.transcriber.beam_size}"
    with (
        open_transcriber(config, engine) as transcriber,
        ThreadPoolExecutor(config.eval.concurrency) as pool,
    ):
        return list(tqdm(pool.map(hear, clips), title, len(clips), unit="clip"))


def paired(
    drawn: Found,
    first: Sequence[Transcript | EarshotError],
    second: Sequence[Transcript | EarshotError],
) -> tuple[list[Pair], dict[str, str]]:
    """Hold the answers of both passes together, the most alike first; of equals, the surest.

    Returns:
        The pairs, and why clips are not among them, by file.

    Raises:
        EarshotError: no clip was heard by both.
    """
    pairs, failed, normalize = list[Pair](), dict(drawn.unreadable), normalizer(DEFAULT)
    for clip, one, other in zip(drawn.clips, first, second, strict=True):
        if isinstance(one, Transcript) and isinstance(other, Transcript):
            references = drawn.references
            pairs.append(pair_of(clip, one, other, references=references, normalize=normalize))
        else:
            failed[clip.file] = str(other if isinstance(one, Transcript) else one)
    if not pairs:
        file, error = next(iter(failed.items()))
        raise EarshotError(f"no clip was heard by both passes; {file}: {error}")
    pairs.sort(key=lambda pair: (pair.difference, WAYS["avg_logprob"](pair)))
    return pairs, failed


def line_of(pair: Pair, threshold: float) -> dict[str, object]:
    """Return the keys of a manifest's line, and what says whether to trust it."""
    line = dataclasses.asdict(pair)
    del line["edits"]
    return {**line, "trusted": is_trusted(pair, threshold)}


def figures_of(pairs: Sequence[Pair], failed: int, whole: Whole, threshold: float) -> Figures:
    """Count what is trusted, and draw the curve."""
    silent = [pair for pair in pairs if pair.silence]
    said = [pair.edits.length for pair in silent if pair.edits]
    known = any(pair.edits for pair in pairs)
    return Figures(
        whole=whole,
        failed=failed,
        trusted=sum(is_trusted(pair, threshold) for pair in pairs),
        silences=len(silent),
        silences_right=said.count(0) if known else None,
        points=tuple(curve(pairs, whole, threshold)),
    )


def report_of(figures: Figures, threshold: float) -> tuple[Table, Text]:
    """Tabulate the figures by threshold, and count what is trusted."""
    by_threshold: dict[float, list[Point]] = {}
    for point in figures.points:
        by_threshold.setdefault(point.threshold, []).append(point)
    ways = [point.by for point in by_threshold[EVERY] if point.cer]
    header = ["texts differ by at most", "clips", "seconds"]
    header += [title for way in ways for title in (f"CER by {way}", "exact")]
    rows = [
        [
            "all" if limit == EVERY else f"{limit:g} %",
            f"{points[0].clips_percent:.0f} %",
            f"{points[0].seconds_percent:.0f} %",
            *(cell for point in points for cell in _rightness(point) if ways),
        ]
        for limit, points in by_threshold.items()
    ]
    right = figures.silences_right
    of_them = "" if right is None else f", rightly in {right}"
    counts = (
        f"trusted at {threshold:g} %: {figures.trusted} of {figures.whole.clips} clips; agreed on "
        f"silence: {figures.silences}{of_them}; failed: {figures.failed}"
    )
    return Table(header, rows), Text(counts)


def _rightness(point: Point) -> tuple[str, str]:
    exact = "" if point.exact_percent is None else f"{point.exact_percent:.0f} %"
    return (percent(point.cer) if point.cer else "none"), exact
