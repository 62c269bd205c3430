"""The plan of `python -m eval bench`. Light, for the command's flags are made from it."""

import dataclasses
from collections.abc import Iterable

from eval.config import Config, changed
from serve.contract.config import RuntimeConfig
from serve.contract.errors import ConfigError
from serve.contract.fields import ShortEncoder

WORKLOADS = {
    "start": "from an engine folder on the disk to a runtime that is ready",
    "throughput": "the runtime is kept full of windows of 30 s, 128 tokens each",
    "words": "the same, and the times of each window's words are found",
    "latency": "one request at a time, of 40 tokens",
    "mlperf": "MLPerf-shaped: 30 s windows, all at hand at the start, lengths as in MLPerf's set",
    "open-loop": "requests as in latency, arriving at random (Poisson) below saturation",
}
FORMER_NAMES = {"a": "throughput", "b": "latency", "c": "mlperf", "d": "open-loop"}


DRAFT_LAYERS = 2  # of the draft decoder, as distil-large-v3 has
DRAFT_TOKENS = 3  # a turn, where the configuration names none


@dataclasses.dataclass(frozen=True)
class Plan:
    """Workloads and their settings; the command's flags have these defaults."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    # Throughput with each; latency and open-loop with the first, mlperf with the last.
    slots: tuple[int, ...] = (64, 256)
    seconds: float = 20.0  # least time of a throughput figure, its warm-up apart
    beam_size: int = 1  # of every request; 1 = greedy, whatever the configuration's default is
    draft_acceptance: float | None = None  # of a draft decoder's guesses; None: there is none
    requests: int = 200  # counted of the latency workload, through Triton too
    request_s: float = 10.0  # of sound, of latency's and open-loop's requests
    short_encoder: ShortEncoder = "auto"  # of these; see `TranscriberConfig.short_encoder`
    ablate: bool = False
    through_server: bool = False
    devices: tuple[str, ...] = ()  # a server on each in turn, and nothing else
    clients: int = 256  # requests in flight for each of their engines
    peers: tuple[str, ...] = ()

    def workloads_with(self, slots: int) -> list[str]:
        """List the workloads that run with so many slots, in order."""
        fits = {"latency": slots == self.slots[0], "throughput": True, "words": True}
        fits |= {"open-loop": slots == self.slots[0], "mlperf": slots == self.slots[-1]}
        return [name for name, fit in fits.items() if fit and name in self.workloads]


def configured(config: Config, plan: Plan) -> Config:
    """Set the plan's beam as the default, a row for each beam, and drafts."""
    config = changed(config, "transcriber", beam_size=plan.beam_size)
    runtime = with_slots(config, config.runtime.slots)
    if plan.draft_acceptance is not None:
        runtime = dataclasses.replace(runtime, draft_tokens=runtime.draft_tokens or DRAFT_TOKENS)
    return dataclasses.replace(config, runtime=runtime)


def with_slots(config: Config, slots: int) -> RuntimeConfig:
    """Configure so many slots: with a row for each beam of the configured search."""
    beam_size = config.transcriber.beam_size
    rows = slots * beam_size if beam_size > 1 else 0
    return dataclasses.replace(config.runtime, slots=slots, rows=rows)


def check_workloads(names: Iterable[str]) -> None:
    """Refuse names of workloads that do not exist.

    Raises:
        ConfigError: a name is unknown; the message lists those that exist, and what a letter of
            former versions is called now.
    """
    unknown = sorted(set(names) - WORKLOADS.keys())
    if not unknown:
        return
    renamed = [f"{name} is now {FORMER_NAMES[name]}" for name in unknown if name in FORMER_NAMES]
    raise ConfigError(
        f"unknown workloads: {', '.join(unknown)}; known: {', '.join(WORKLOADS)}"
        + (f" ({', '.join(renamed)})" if renamed else "")
    )
