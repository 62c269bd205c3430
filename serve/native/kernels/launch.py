"""Launching kernels, or compiling many of them side by side first.

The first launch of a kernel with new kinds of arguments compiles it and the C function that hands
its arguments over, which takes some tenths of a second of one core. A runtime has dozens of them.
So before it launches any, it goes through its work once without launching: see `compiled_together`.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

_launcher_of = operator.attrgetter("run")  # to read it builds the launcher and loads the kernel
_MOST_OVERLAPPING = 64  # rows; with more, launches measured quicker one after the other
_only_compiling = contextvars.ContextVar("only_compiling", default=False)


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """Return what launches a kernel over a grid, given its arguments."""
    if _only_compiling.get():
        return functools.partial(kernel.warmup, grid=grid)
    launcher: Callable[..., Any] = kernel[grid]
    return launcher


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Launches that may begin while the one before them ends, as Hopper's dependent ones do."""

    possible: bool

    @staticmethod
    def of(device: torch.device) -> "Overlap":
        """Ask a device."""
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return Overlap(able)

    def gains(self, rows: int) -> bool:
        """Tell whether a launch over so many rows does."""
        return self.possible and rows <= _MOST_OVERLAPPING


class _Compilers(concurrent.futures.ThreadPoolExecutor):
    """Threads that compile kernels and make them ready to be launched on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device.index or 0,)
        )

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Compile by `fn`, which returns the kernel."""

        def ready() -> Any:
            kernel = fn(*args, **kwargs)
            _launcher_of(kernel)
            return kernel

        return super().submit(ready)


@contextlib.contextmanager
def compiled_together(
    device: torch.device, *shortening: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Inside, kernels are not launched, and so compute nothing; at the end all are compiled.

    Those that Triton has in its cache on the disk are loaded from there.

    Args:
        device: for which.
        shortening: what is entered with it, for the work not to launch the same again and again.
    """
    threads = _Compilers(device)
    with threads, triton.AsyncCompileMode(threads), contextlib.ExitStack() as stack:
        for manager in shortening:
            stack.enter_context(manager)
        before = _only_compiling.set(True)
        try:
            yield
        finally:
            _only_compiling.reset(before)
