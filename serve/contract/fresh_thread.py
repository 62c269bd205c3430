"""Work that leaves no OpenMP threads behind."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_fresh_thread(work: Callable[[], Result]) -> Result:
    """Do work on a thread that ends with it.

    OpenMP keeps threads for each thread that computes. Once there are more of them than cores, they
    sleep between products instead of waiting awake, and a decoder step takes twice as long. So what
    computes for a while beside the thread that decodes does it on a thread that ends.
    """
    with ThreadPoolExecutor(1, "earshot-apart") as thread:
        return thread.submit(work).result()
