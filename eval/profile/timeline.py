"""Read from a profiler's Chrome trace when the device worked, by phase and kernel, and when not.

On a GPU the work is kernels and copies, which belong to the phase in which they were launched. On a
CPU it is operators, each without the operators that it calls. A phase is a range that the runtime's
stopwatches open; see `serve.native.stopwatch`.
"""

import bisect
import collections
import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LOAD = "load"
"""Name of the range around all of it."""
BETWEEN = "between"
"""Name of the time in no phase."""
PHASES = ("encode", "prompts", "steps", "words")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_US = 1e6
_GAPS = 15  # the longest, that are kept


@dataclasses.dataclass(frozen=True)
class TraceSlice:
    """A piece of work, or a range; times in microseconds."""

    name: str
    begin: float
    end: float
    thread: object
    correlation: int | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All work of a name in a phase."""

    name: str
    phase: str
    calls: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """The device's time in a phase."""

    name: str
    busy_s: float
    idle_s: float  # while nothing else was done either


@dataclasses.dataclass(frozen=True)
class DeviceIdle:
    """A time in which the device did nothing."""

    at_s: float  # after the load's begin
    seconds: float
    phase: str  # that the host was in at its begin
    after: str  # the work before it
    before: str


@dataclasses.dataclass(frozen=True)
class DeviceTimeline:
    """The device's work and idle times during a load."""

    seconds: float  # of the load
    busy_s: float
    phases: tuple[PhaseTime, ...]
    kernels: tuple[Kernel, ...]  # the longest first
    gaps: tuple[DeviceIdle, ...]  # likewise


def read_timeline(path: Path) -> DeviceTimeline:
    """Read a Chrome trace, a JSON file packed by gzip.

    Raises:
        ValueError: the load is not in it.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return timeline_of(json.load(file)["traceEvents"])


def timeline_of(events: Iterable[Mapping[str, Any]]) -> DeviceTimeline:
    """Add up the events of a trace; see `read_timeline`."""
    by_kind: dict[str, list[TraceSlice]] = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(_slice(event))
    ranges = by_kind["user_annotation"]
    load = next((part for part in ranges if part.name == LOAD), None)
    if load is None:
        raise ValueError(f"the trace has no range {LOAD}")
    phases = _TracePhases(part for part in ranges if part.name in PHASES)
    work = [one for one in _work(by_kind, phases) if load.begin <= one[0].begin < load.end]
    work.sort(key=lambda one: one[0].begin)
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    spent: dict[tuple[str, str], float] = collections.defaultdict(float)
    busy: dict[str, float] = collections.defaultdict(float)
    idle: dict[str, float] = collections.defaultdict(float)
    for part, phase, own in work:
        calls[part.name, phase] += 1
        spent[part.name, phase] += own / _US
        busy[phase] += own / _US
    gaps = [
        DeviceIdle((begin - load.begin) / _US, (end - begin) / _US, phases.at(begin), after, before)
        for begin, end, after, before in _gaps(load, [part for part, _, _ in work])
    ]
    for gap in gaps:
        idle[gap.phase] += gap.seconds
    seconds = (load.end - load.begin) / _US
    times = [PhaseTime(name, busy[name], idle[name]) for name in (*PHASES, BETWEEN)]
    kernels = [Kernel(*key, calls[key], spent[key]) for key in calls]
    return DeviceTimeline(
        seconds,
        seconds - sum(gap.seconds for gap in gaps),
        tuple(time for time in times if time.busy_s or time.idle_s),
        tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:_GAPS]),
    )


def _slice(event: Mapping[str, Any]) -> TraceSlice:
    begin, correlation = float(event["ts"]), event.get("args", {}).get("correlation")
    thread = event.get("pid"), event.get("tid")
    end = begin + float(event.get("dur", 0))
    return TraceSlice(str(event["name"]), begin, end, thread, correlation)


class _TracePhases:
    """The phases of a trace, by thread and time; they do not overlap within a thread."""

    def __init__(self, ranges: Iterable[TraceSlice]) -> None:
        self._ranges: dict[object, list[TraceSlice]] = collections.defaultdict(list)
        for part in sorted(ranges, key=lambda part: part.begin):
            self._ranges[part.thread].append(part)

    @property
    def threads(self) -> set[object]:
        """Return the threads that have phases."""
        return set(self._ranges)

    def of(self, part: TraceSlice) -> str:
        """Return the phase in which something began, by the thread that did it."""
        return self._at(part.thread, part.begin)

    def at(self, moment: float) -> str:
        """Return the phase that any thread is in."""
        found = (self._at(thread, moment) for thread in self._ranges)
        return next((phase for phase in found if phase != BETWEEN), BETWEEN)

    def _at(self, thread: object, moment: float) -> str:
        ranges = self._ranges.get(thread, [])
        index = bisect.bisect_right(ranges, moment, key=lambda part: part.begin) - 1
        return ranges[index].name if index >= 0 and moment < ranges[index].end else BETWEEN


def _work(
    by_kind: Mapping[str, list[TraceSlice]], phases: _TracePhases
) -> list[tuple[TraceSlice, str, float]]:
    """Return the work of the device, each with its phase and its own time in microseconds."""
    on_gpu = [part for kind in _ON_GPU for part in by_kind[kind]]
    if on_gpu:
        launches = {part.correlation: part for kind in _LAUNCHES for part in by_kind[kind]}
        return [
            (part, phases.of(launches.get(part.correlation, part)), part.end - part.begin)
            for part in on_gpu
        ]
    operators = [part for part in by_kind["cpu_op"] if part.thread in phases.threads]
    return [(part, phases.of(part), own) for part, own in _own_times(operators)]


def _own_times(parts: Iterable[TraceSlice]) -> list[tuple[TraceSlice, float]]:
    """Return each operator with its time without that of the operators that it calls."""
    ordered = sorted(parts, key=lambda part: (part.begin, -part.end))
    own = [part.end - part.begin for part in ordered]
    callers: dict[object, list[int]] = collections.defaultdict(list)  # under way, by thread
    for index, part in enumerate(ordered):
        calling = callers[part.thread]
        while calling and ordered[calling[-1]].end <= part.begin:
            calling.pop()
        if calling:
            own[calling[-1]] -= part.end - part.begin
        calling.append(index)
    return [(part, max(0.0, seconds)) for part, seconds in zip(ordered, own, strict=True)]


def _gaps(load: TraceSlice, work: Sequence[TraceSlice]) -> Iterable[tuple[float, float, str, str]]:
    """Yield begin and end of the times without work, and the work before and after each."""
    reached, last = load.begin, "the load's begin"
    for part in work:
        if part.begin > reached:
            yield reached, part.begin, last, part.name
        if part.end > reached:
            reached, last = part.end, part.name
    if load.end > reached:
        yield reached, load.end, last, "the load's end"
