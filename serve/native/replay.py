"""Work of a GPU that is recorded once, as CUDA graphs, and replayed from then on.

A host needs some 20 us to launch a kernel, and a step is hundreds: a graph of them is one launch.
It computes on the very memory that it was recorded with, so what changes between replays is written
there first.
"""

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch

Work = Callable[[], None]


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


def capture(work: Work, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Run once, so that everything is compiled and planned, then record, and replay once.

    What is recorded on one stream shares the libraries' workspaces, on two it does not. The first
    replay of a graph takes it to the device, for which no window is to wait.

    Nothing is collected meanwhile: garbage may hold a graph of a runtime that is gone, and CUDA
    refuses to free one while another is recorded.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
    finally:
        if collects:
            gc.enable()
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
