"""`python -m eval plan`: GPUs for a load, and what an hour of audio costs."""

import math
from pathlib import Path

from eval.plan.measured import REQUEST_S, Measured, find_measured
from eval.record import Result, Run


def plan(
    run: Run, *, measured: Path | None, load: float, p99: float, price: float | None
) -> Result:
    """Show how many GPUs an even load needs.

    Args:
        run: of a product that was benched on such a GPU.
        measured: a file of the bench; None is the committed one.
        load: requests of 10 s of audio a second.
        p99: seconds within which 99 of 100 are answered.
        price: of a GPU for an hour.

    Raises:
        ConfigError: a figure is needed that nobody has measured.
    """
    for line in steady(find_measured(run.config, measured), load, p99, price):
        run.show(line)
    return Result()


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
