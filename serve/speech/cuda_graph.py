"""Capture GPU work as a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], None]


def capture(
    work: Work, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Run the work once for compilation and planning, then capture it, and replay it once.

    Graphs captured on the same stream share the libraries' workspaces. The first replay uploads the
    graph to the device, so that no window waits for it.

    The garbage collector is off meanwhile: garbage may hold a graph of a closed runtime, and CUDA
    refuses to free a graph during a capture.

    Args:
        work: launches kernels without synchronizing with the device.
        pool: the memory pool, shared with graphs that never run at the same time; None: a new one.
        stream: the stream of later replays; None: any.
    """
    stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
