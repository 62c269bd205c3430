"""Run work so that it leaves no OpenMP threads behind."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_fresh_thread(work: Callable[[], Result]) -> Result:
    """Run `work` on a new thread and return its result.

    OpenMP keeps a pool of threads for each thread that computes. If there are more threads
    than cores, they sleep between matrix products instead of spinning. A decoder step then takes
    twice as long. Occasional work therefore runs on a thread that ends.
    """
    with ThreadPoolExecutor(1, "earshot-apart") as thread:
        return thread.submit(work).result()
