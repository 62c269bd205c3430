"""Launching kernels, or compiling many of them side by side first.

The first launch of a kernel with new kinds of arguments compiles it, which takes some tenths of a
second of one core. A runtime has dozens of them. So before it launches any, it goes through its
work once without launching: see `compiled_together`.
"""

import concurrent.futures
import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import triton

_only_compiling = contextvars.ContextVar("only_compiling", default=False)


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """What launches a kernel over a grid, given its arguments."""
    if _only_compiling.get():
        return functools.partial(kernel.warmup, grid=grid)
    launcher: Callable[..., Any] = kernel[grid]
    return launcher


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Inside, kernels are not launched, and so compute nothing; at the end all are compiled.

    Those that Triton has in its cache on the disk are loaded from there.
    """
    threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    with threads, triton.AsyncCompileMode(threads):
        before = _only_compiling.set(True)
        try:
            yield
        finally:
            _only_compiling.reset(before)
