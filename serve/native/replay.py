"""Work of a GPU that is recorded once, as CUDA graphs, and replayed from then on.

A host needs some 20 us to launch a kernel, and a step is hundreds: a graph of them is one launch.
It computes on the very memory that it was recorded with, so what changes between replays is written
there first.
"""

from collections.abc import Hashable

import torch

from serve.speech.cuda_graph import Work, capture


class Replay:
    """Pieces of work that never run at the same time, each by a key."""

    def __init__(self) -> None:
        # Graphs hold bare addresses; what they compute with lives as long as the work is here.
        self._works: dict[Hashable, Work] = {}
        self._rehearsals: list[Work] = []
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def add(self, key: Hashable, work: Work, rehearsal: Work | None = None) -> None:
        """Add a piece of work, the largest first: the others fit in its memory.

        Args:
            key: by which it is replayed.
            work: launches kernels, and asks the device for nothing.
            rehearsal: launches each of its kernels at least once; None: the work itself.
        """
        self._works[key] = work
        self._rehearsals.append(rehearsal or work)

    def rehearse(self) -> None:
        """Launch every kernel that will be recorded."""
        for rehearsal in self._rehearsals:
            rehearsal()

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record all that was added; nothing can be replayed before.

        Args:
            stream: on which replays will be.
        """
        pool = torch.cuda.graph_pool_handle()
        for key, work in self._works.items():
            self._graphs[key] = capture(work, pool, stream)

    def __contains__(self, key: Hashable) -> bool:
        """Tell whether a piece of work is recorded."""
        return key in self._graphs

    def launch(self, key: Hashable) -> None:
        """Launch a piece of work, on the current stream."""
        self._graphs[key].replay()
