"""Work of a GPU recorded as a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], None]


def capture(
    work: Work, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Run once, so that everything is compiled and planned, then record, and replay once.

    What is recorded on one stream shares the libraries' workspaces, on two it does not. The first
    replay of a graph takes it to the device, for which no window is to wait.

    Nothing is collected meanwhile: garbage may hold a graph of a runtime that is gone, and CUDA
    refuses to free one while another is recorded.

    Args:
        work: launches kernels, and asks the device for nothing.
        pool: whose memory it takes, as others do that never run at the same time; None: its own.
        stream: on which replays will be; None: any.
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
