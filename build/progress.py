"""Show the progress of a build's long steps on stderr: a bar on a terminal, otherwise lines."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

_LINE_EVERY_S = 10.0

T = TypeVar("T")


@contextlib.contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show how many units of a step are done.

    The bar disappears at the end. If stderr is not a terminal, there is a line at the start, one
    at the end, and one every 10 s or less often.

    Args:
        title: the step's name, such as "Verifying".
        total: the number of units.
        unit: the name of the units, in the plural.

    Yields:
        A function to call after each unit.
    """
    if sys.stderr.isatty():
        with tqdm(desc=title, total=total, unit=f" {unit}", leave=False) as bar:
            yield lambda: bar.update() and None
        return
    done, begun = 0, time.monotonic()
    written = begun

    def advance() -> None:
        nonlocal done, written
        done, now = done + 1, time.monotonic()
        if done == total or now - written >= _LINE_EVERY_S:
            written = now
            _write_line(f"{title}: {done} of {total} {unit} after {now - begun:.0f} s")

    _write_line(f"{title}: {total} {unit} …")
    yield advance


def tracked(items: Sequence[T], title: str, unit: str) -> Iterator[T]:
    """Yield items and show how many of them are done; see `progress`."""
    with progress(title, len(items), unit) as done:
        for item in items:
            yield item
            done()


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
