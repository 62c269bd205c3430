"""`python -m eval plan`: GPUs for a load, what an hour of audio costs, and a day of autoscaling."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from eval.files import write_text
from eval.measurement import Check, Result, Run, table
from eval.plan.day import arrivals_per_s
from eval.plan.measured import REQUEST_S, Measured, find_measured
from eval.plan.plot import draw
from eval.plan.policy import Policy, read_policy
from eval.plan.sweep import ALIKE, Outcome, Simulation, candidates, choose, fixed
from serve.contract.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Days:
    """The days that are replayed, as the flags say it."""

    load: float
    p99: float
    price: float | None
    provision_s: float
    policy: Path
    slower: float
    days: int
    seed: int


def plan(
    run: Run, *, measured: Path | None, simulate: bool, provision_s: float | None, **of: Any
) -> Result:
    """Show what an even load needs, and replay days of it where that is asked for.

    Args:
        run: of a product of which is known what a GPU does.
        measured: a file of the bench; None is the committed one.
        simulate: whether days are replayed.
        provision_s: needed for it.
        of: the other fields of `Days`.

    Raises:
        ConfigError: something is needed that nobody has measured or told.
    """
    gpu = find_measured(run.config, measured)
    if simulate and provision_s is None:
        raise ConfigError(
            "--simulate needs --provision-s: how long your cluster takes from the call for a pod "
            "to its container's start (a GPU's node, image and volume); nothing here can know it"
        )
    for line in steady(gpu, of["load"], of["p99"], of["price"]):
        run.show(line)
    if not simulate or provision_s is None:
        return Result()
    return _simulate(run, gpu, Days(provision_s=provision_s, **of))


def steady(measured: Measured, load: float, p99_s: float, price: float | None) -> list[str]:
    """Say what an even load needs, in lines."""
    each = measured.most_per_s(p99_s)
    gpus = math.ceil(load / each)
    audio_hours = load * REQUEST_S  # an hour
    at_s = float(measured.latency_s([load / gpus], "p99")[0])
    lines = [
        f"measured  {measured.source}: {measured.conditions}",
        f"a GPU     {each:.0f} requests of {REQUEST_S:g} s a second with a p99 of {p99_s:g} s "
        f"({each / measured.saturated_per_s:.0%} of {measured.saturated_per_s:.0f} at most)",
        f"GPUs      {gpus} for {load:g} requests a second, {load / gpus:.0f} each, p99 "
        f"{at_s:.3f} s; one more if one may fail",
        f"audio     {audio_hours:.0f} hours an hour, {audio_hours / gpus:.0f} for a GPU hour",
    ]
    if measured.server_s is None:
        lines.append("          of the runtime alone: the file lacks what the server adds")
    if price is None:
        lines.append("cost      give --price, of a GPU for an hour")
    else:
        lines.append(f"cost      {price * gpus / audio_hours:.5f} for an hour of audio")
    return lines


def _simulate(run: Run, measured: Measured, options: Days) -> Result:
    progress = run.say
    if measured.start_s is None:
        raise ConfigError(
            f"{measured.source} has no figure of the workload start, so how long a server takes "
            "until it is ready is not known; bench it, too"
        )
    policy = read_policy(options.policy)
    gpu = measured.slower(options.slower)
    days = [arrivals_per_s(options.load, options.seed + day) for day in range(options.days)]
    start_s = options.provision_s + measured.start_s
    pending = run.config.transcriber.max_pending
    simulation = Simulation(gpu, days, start_s, pending, options.p99)
    scaled = simulation.outcomes([policy, *candidates(policy, measured)], progress)
    always = simulation.least_fixed(policy, progress)
    fewer = simulation.outcome(fixed(policy, max(1, always.policy.least - 1)))
    chosen = choose(scaled, policy, options.p99)
    conditions = (
        f"{options.days} days of {options.load:g} requests of {REQUEST_S:g} s a second on average "
        f"(at most {max(day.max() for day in days):.0f}), seed {options.seed}; a pod is ready "
        f"{start_s:.0f} s after it is called for, of which {options.provision_s:g} until its "
        f"container starts; it holds {pending} requests (transcriber.max_pending)"
    )
    if options.slower != 1:
        conditions += f"; GPUs take {options.slower:g} times as long as measured"
    rows = table(*_rows([*scaled, fewer, always], policy, options.p99, options.price))
    verdict = _verdict(chosen, policy, options.policy, options.p99)
    folder = run.folder
    write_text(folder / "plan.md", f"{conditions}.\n\n{rows}\n\n{verdict}\n")
    shown = [outcome for outcome in (chosen, scaled[-1], always) if outcome is not None]
    title = f"{options.load:g} requests/s on average, pods ready after {start_s:.0f} s"
    draw(folder / "day.png", [outcome.days[0] for outcome in shown], options.p99, title)
    text = (
        f"\n{conditions}\n\n{rows}\n\n{verdict}\n"
        f"The report: {folder / 'plan.md'}, with a picture beside it"
    )
    held = Check(f"a policy holds a p99 of {options.p99:g} s", chosen is not None, verdict)
    return Result({"conditions": conditions, "rows": [*map(_row, scaled)]}, (held,), text)


def _rows(
    outcomes: list[Outcome], deployed: Policy, p99_s: float, price: float | None
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table."""
    header = ["policy", "p99", "its worst minute", f"minutes over {p99_s:g} s", "refused"]
    header += ["GPU hours a day", "most GPUs", *["an hour of audio"] * (price is not None)]
    rows = []
    for outcome in outcomes:
        row = [
            outcome.policy.name + " **(deployed)**" * (outcome.policy == deployed),
            f"{outcome.p99_s:.2f} s",
            f"{max(day.worst_minute_s for day in outcome.days):.2f} s",
            str(max(day.minutes_over for day in outcome.days)),
            f"{outcome.refused:.3%}",
            f"{outcome.gpu_hours:.0f}",
            str(max(day.most for day in outcome.days)),
        ]
        if price is not None:
            row.append(f"{price * outcome.gpu_hours / outcome.audio_hours:.5f}")
        rows.append(row)
    return header, rows


def _verdict(chosen: Outcome | None, deployed: Policy, path: Path, p99_s: float) -> str:
    if chosen is None:
        return f"None of these policies holds a p99 of {p99_s:g} s; more GPUs at all times would."
    text = f"Fewest GPU hours that hold {p99_s:g} s on every day: {chosen.policy.name}"
    if chosen.policy == deployed:
        return f"{text}, which {path} has (policies within {ALIKE:.0%} of it count as alike)."
    return f"{text}; {path} has {deployed.name}."


def _row(outcome: Outcome) -> dict[str, object]:
    return {
        "policy": outcome.policy.name,
        "p99_s": outcome.p99_s,
        "refused": outcome.refused,
        "gpu_hours": outcome.gpu_hours,
    }
