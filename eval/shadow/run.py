"""`python -m eval shadow`: after how many requests does the shadow monitor find a broken engine?

The config's engine and its reference hear clips. Those of one half are the baseline. The others
stand for requests, which are drawn in many orders, with replacement: a sound engine should raise no
alert, and copies of it in each of which one layer's scales are wrong should raise one soon.

shadow.json      the figures, and the baseline for a config
heard/           what each engine said, which is not heard again
broken/          the broken engines, one for each layer
"""

import dataclasses
import hashlib
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from build.clips import Clip
from eval.corpora.find import duration_s, find_clips
from eval.files import read_jsonl, write_jsonl
from eval.measurement import Check, Result, Run, table
from eval.shadow.broken import break_engine
from serve.contract.codec import to_json
from serve.contract.config import Config
from serve.contract.engine import open_engine
from serve.contract.errors import ConfigError
from serve.contract.files import read_bytes
from serve.contract.messages import Request, Transcript
from serve.contract.server_config import ShadowBaseline
from serve.gateway.shadow.figures import (
    BOUND,
    Comparison,
    Drift,
    Rate,
    baseline_of,
    compare,
    pooled_cer,
)
from serve.transcriber.open import open_transcriber

SOON = 200
"""Requests within which a broken engine is to be found."""
_SOUND = "sound"
_SEED = 20  # of the orders
_KEPT = 32  # clips that are heard between two writings
_CHOOSE = "choose"  # the half that settings are chosen on


@dataclasses.dataclass(frozen=True)
class Found:
    """What the monitor says of an engine."""

    engine: str  # "sound", or the layer that is broken
    clips: int
    cer: Rate | None  # against the reference
    gaps: ShadowBaseline  # what they are like
    alerts: tuple[int | None, ...]  # of each order, the request that raised one

    @property
    def raised(self) -> list[int]:
        """List the requests after which there was an alert."""
        return sorted(after for after in self.alerts if after is not None)


@dataclasses.dataclass(frozen=True)
class Figures:
    """All that was found."""

    baseline: ShadowBaseline
    baseline_clips: int
    bound: float
    found: tuple[Found, ...]


def measure_shadow(
    run: Run, *, reference: str, layers: tuple[str, ...], factor: float, requests: int, orders: int
) -> Result:
    """Measure how soon the monitor finds what is broken, and whether it leaves alone what is not.

    Args:
        run: of a config whose engine is there.
        reference: folder of the reference's engine.
        layers: each is broken in an engine of its own.
        factor: by which its scales are multiplied.
        requests: of an order.
        orders: how many are drawn.

    Raises:
        EarshotError: the clips or an engine are not to be had, or an answer failed.
    """
    config = run.config
    clips = _clips(run)
    told = [clip for clip, of_baseline in clips if of_baseline]
    others = [clip for clip, of_baseline in clips if not of_baseline]
    expected = _hear(run, reference, told + others)
    engines = {_SOUND: config.engine}
    for layer in layers:
        folder = run.folder / "broken" / layer
        break_engine(config.engine, folder, layer, factor)
        engines[layer] = str(folder)
    heard = _hear(run, config.engine, told)
    baseline = baseline_of([compare(heard[clip.file], expected[clip.file]) for clip in told])
    found = []
    for name, engine in engines.items():
        answers = _hear(run, engine, others)
        pairs = [compare(answers[clip.file], expected[clip.file]) for clip in others]
        alerts = tuple(_alerts(pairs, baseline, requests, orders))
        found.append(Found(name, len(pairs), pooled_cer(pairs), baseline_of(pairs), alerts))
    figures = Figures(baseline, len(told), BOUND, tuple(found))
    return Result(figures, tuple(_checks(figures, requests)), _text(figures, requests))


def _clips(run: Run) -> list[tuple[Clip, bool]]:
    """Draw clips of both halves, and say which are the baseline's; every second without halves."""
    of = run.config.eval
    drawn = find_clips(
        of.manifest, limit=of.limit, seed=of.seed, read=duration_s, need_references=False
    )
    run.say(drawn.summary)
    if len(drawn.clips) < 4:
        raise ConfigError(f"{of.manifest} has {len(drawn.clips)} clips; expected 4 or more")
    return [
        (clip, clip.half == _CHOOSE if clip.half else number % 2 == 0)
        for number, clip in enumerate(drawn.clips)
    ]


@dataclasses.dataclass(frozen=True)
class _Line:
    file: str
    transcript: Transcript


def _hear(run: Run, engine: str, clips: Sequence[Clip]) -> dict[str, Transcript]:
    """Return what an engine says of each clip, by file, and keep it.

    Raises:
        EarshotError: it cannot answer one.
    """
    config = run.config
    path = run.folder / "heard" / f"{_made_of(config, engine)}.jsonl"
    lines = read_jsonl(path, _Line, "answers") if path.is_file() else []
    known = {line.file: line.transcript for line in lines}
    left = [clip for clip in clips if clip.file not in known]
    if left:
        with (
            open_transcriber(config, engine) as transcriber,
            ThreadPoolExecutor(config.eval.concurrency) as pool,
            tqdm(desc=engine, total=len(left), unit="clip", leave=False) as bar,
        ):
            for begin in range(0, len(left), _KEPT):
                some = left[begin : begin + _KEPT]
                answers = pool.map(
                    lambda clip: transcriber.transcribe(Request(read_bytes(clip.path))), some
                )
                known |= {clip.file: answer for clip, answer in zip(some, answers, strict=True)}
                write_jsonl(path, [_Line(*item) for item in known.items()])
                bar.update(len(some))
    return known


def _made_of(config: Config, engine: str) -> str:
    """Name what an answer depends on, in a hash."""
    manifest = open_engine(engine).manifest
    text = to_json([manifest.files, config.transcriber, config.runtime.device])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _alerts(
    pairs: Sequence[Comparison], baseline: ShadowBaseline, requests: int, orders: int
) -> list[int | None]:
    """Draw orders of requests; return after which of them each has raised an alert."""
    chance, alerts = random.Random(_SEED), []
    for _ in range(orders):
        drift, raised = Drift(baseline), None
        for number, pair in enumerate(chance.choices(pairs, k=requests), start=1):
            drift.add(pair.gaps)
            if drift.value > BOUND:
                raised = number
                break
        alerts.append(raised)
    return alerts


def _checks(figures: Figures, requests: int) -> list[Check]:
    checks = []
    for found in figures.found:
        raised, orders = found.raised, len(found.alerts)
        if found.engine == _SOUND:
            name = f"a sound engine raises no alert in {requests} requests"
            checks.append(Check(name, not raised, f"{len(raised)} of {orders} orders have one"))
        else:
            soon = [after for after in raised if after <= SOON]
            name = f"{found.engine} broken raises one within {SOON}"
            checks.append(Check(name, len(soon) == orders, f"{len(soon)} of {orders} orders do"))
    return checks


def _text(figures: Figures, requests: int) -> str:
    rows = [
        (
            found.engine,
            str(found.clips),
            "" if found.cer is None else _rate(found.cer),
            f"{len(found.raised)} of {len(found.alerts)}",
            f"{statistics.median(found.raised):.0f}" if found.raised else "",
            str(found.raised[-1]) if found.raised else "",
        )
        for found in figures.found
    ]
    head = ("engine", "clips", "CER to reference", "orders with an alert", "median", "latest")
    kinds = "\n".join(
        f"{kind} = {list(spread)}" for kind, spread in dataclasses.asdict(figures.baseline).items()
    )
    return (
        f"{table(head, rows)}\n\nOrders of {requests} requests; median and latest: the request "
        f"that raised the alert.\nThe baseline, of {figures.baseline_clips} other clips, for the "
        f"config:\n\n[shadow.baseline]\n{kinds}"
    )


def _rate(rate: Rate) -> str:
    return f"{100 * rate.value:.2f} % [{100 * rate.low:.2f}, {100 * rate.high:.2f}]"
