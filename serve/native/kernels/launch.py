"""Launch kernels, and compile many of them in parallel before the first launch.

The first launch of a kernel with new argument types compiles the kernel and its C launcher. This
takes some tenths of a second on one core, and a runtime has dozens of kernels. Before its first
launch, a runtime therefore runs its work once inside `compile_in_parallel`, which only compiles.
"""

import concurrent.futures
import contextlib
import contextvars
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

_launcher_of = operator.attrgetter("run")  # reading it builds the launcher and loads the kernel
MAX_OVERLAPPING_ROWS = 64
"""Rows up to which launches overlap the end of the previous kernel (programmatic dependent launch);
with more, this measured slower."""
# NOTE: all launchers of a process are modules of one name. When Python loads a launcher's file
# again, for a kernel with the same argument types, it changes the module that was loaded last. A
# thread that has not read its `launch` from there yet would get the other kernel's: "function takes
# exactly 21 arguments (33 given)".
_LOADING = threading.Lock()
_only_compiling = contextvars.ContextVar("only_compiling", default=False)


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """Return a function that launches a kernel over a grid with given arguments."""
    if _only_compiling.get():
        return functools.partial(kernel.warmup, grid=grid)
    launcher: Callable[..., Any] = kernel[grid]
    return launcher


class _Compilers(concurrent.futures.ThreadPoolExecutor):
    """A thread pool that compiles kernels and loads them on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device.index or 0,)
        )

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Submit `fn`, which compiles and returns a kernel; load the kernel after it."""

        def ready() -> Any:
            kernel = fn(*args, **kwargs)
            with _LOADING:
                _launcher_of(kernel)
            return kernel

        return super().submit(ready)


@contextlib.contextmanager
def compile_in_parallel(
    device: torch.device, *contexts: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Compile the kernels that the body launches, in parallel, instead of running them.

    When this block ends, all kernels are compiled. Kernels in Triton's disk cache are loaded.

    Args:
        device: the device to compile for.
        contexts: context managers around the body, which skip launches that repeat earlier ones.
    """
    compilers = _Compilers(device)
    with compilers, triton.AsyncCompileMode(compilers), contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        token = _only_compiling.set(True)
        try:
            yield
        finally:
            _only_compiling.reset(token)
