"""Record GPU work once as CUDA graphs, and replay it.

The host needs about 20 µs to launch a kernel, and a step has hundreds of them; a graph is one
launch. A graph reads and writes the memory that it was recorded with, so changing inputs are
copied there before a replay.
"""

from collections.abc import Hashable

import torch

from serve.speech.features import Work, capture


class GraphCache:
    """CUDA graphs by key; no two of them run at the same time, so they share memory."""

    def __init__(self) -> None:
        # Graphs hold bare addresses. Keeping the functions keeps their tensors alive.
        self._works: dict[Hashable, Work] = {}
        self._rehearsals: list[Work] = []
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def add(self, key: Hashable, work: Work, rehearsal: Work | None = None) -> None:
        """Add work to record. Add the largest first: the others then fit into its memory.

        Args:
            key: the key for `launch`.
            work: a function that launches kernels and does not wait for the device.
            rehearsal: a function that launches each of these kernels at least once; None: `work`.
        """
        self._works[key] = work
        self._rehearsals.append(rehearsal or work)

    def rehearse(self) -> None:
        """Launch every kernel that will be recorded, so that it is compiled."""
        for rehearsal in self._rehearsals:
            rehearsal()

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record all added work; call this before the first `launch`.

        Args:
            stream: the stream of the replays.
        """
        pool = torch.cuda.graph_pool_handle()
        for key, work in self._works.items():
            self._graphs[key] = capture(work, pool, stream)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def launch(self, key: Hashable) -> None:
        """Replay the work of a key on the current stream."""
        self._graphs[key].replay()
