"""The device that a runtime computes on."""

import contextlib
import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError


def open_device(config: RuntimeConfig) -> torch.device:
    """The configured device, ready; on a CPU, with the configured number of threads.

    Raises:
        UnavailableError: it is not there.
    """
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise UnavailableError(
            f"runtime.device = {config.device!r} is not a device; expected cpu, cuda or cuda:N"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"runtime.device = {config.device!r} is not a device that Earshot runs on; "
            "expected cpu, cuda or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"runtime.device = {config.device!r}, but this machine has "
            f'{torch.cuda.device_count()} CUDA devices; set runtime.device = "cpu"'
        )
    if device.type == "cpu":
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
    return device


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, of several GPUs it is this one that work goes to which names none: kernels do not."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_graphs(device: torch.device, kernels: str) -> None:
    """Refuse CUDA graphs where they cannot be had.

    The torch rules look up on the host what rows ask for, so they cannot be captured.

    Raises:
        UnavailableError: says what to set.
    """
    if device.type != "cuda" or kernels != "triton":
        raise UnavailableError(
            f"runtime.cuda_graph = true needs a CUDA device with triton kernels; the device is "
            f"{device} with {kernels} kernels; set runtime.cuda_graph = false"
        )


def capture(work: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
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
