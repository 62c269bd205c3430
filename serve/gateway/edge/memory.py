"""The memory of large requests goes back to the system when they have gone.

By itself Python finds what refers to itself only after many objects, however large they are: a
refused request's message hangs on its error's traceback. And the C library keeps what is freed.
Measured with 40 messages of 115 MB at once where 400 MiB may be under way: the process took 1,800
to 3,400 MiB without this, and kept most of it.
"""

import ctypes
import gc

LARGE_BYTES = 2**20
_M_MMAP_THRESHOLD = -3  # numbers of glibc's malloc.h
_M_ARENA_MAX = -8
_ARENAS = 2


def prepare() -> None:
    """Let large blocks go back when they are freed; what lives now, at the start, stays."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
    gc.freeze()


def give_back() -> None:
    """Free what only refers to itself, and return what is free to the system."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
