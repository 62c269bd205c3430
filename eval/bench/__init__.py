"""Speed: figures beside the ceilings of the machine, and beside peers.

The command line reads this plan, so it imports no package.
"""

import dataclasses

WORKLOADS = {
    "start": "from an engine folder on the disk to a runtime that is ready",
    "throughput": "the runtime is kept full of windows of 30 s, 128 tokens each",
    "words": "the same, and the times of each window's words are found",
    "latency": "one request at a time, of 40 tokens",
    "mlperf": "MLPerf-shaped: 30 s windows, all at hand at the start, lengths as in MLPerf's set",
    "open-loop": "requests as in latency, arriving at random (Poisson) below saturation",
}


@dataclasses.dataclass(frozen=True)
class BenchPlan:
    """Workloads and their settings; the command's flags have these defaults."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    # Throughput with each; latency and open-loop with the first, mlperf with the last.
    slots: tuple[int, ...] = (64, 256)
    seconds: float = 20.0  # shortest time of a throughput figure, without its warm-up
    beam_size: int = 1  # every request's; 1 = greedy; replaces the default
    requests: int = 200  # counted requests of the latency workload, also through Triton
    request_s: float = 10.0  # audio in a request of latency and open-loop
    ablate: bool = False  # measure each option of the runtime too
    through_server: bool = False
    devices: tuple[str, ...] = ()  # measure only a server on each of these in turn
    peers: tuple[str, ...] = ()

    def workloads_with(self, slots: int) -> list[str]:
        """List the workloads that run with `slots` slots, in order."""
        is_first, is_last = slots == self.slots[0], slots == self.slots[-1]
        runs = {"latency": is_first, "throughput": True, "words": True}
        runs |= {"open-loop": is_first, "mlperf": is_last}
        return [name for name, wanted in runs.items() if wanted and name in self.workloads]
