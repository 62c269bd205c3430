"""Only some stretches of a recording: each is cut by itself, and times are those of the whole."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE
from serve.speech.packing import BREATHER
from serve.speech.windows import Window

Stretch = tuple[float, float]
"""Start and end in seconds; the end may be infinite."""

CutOne = Callable[[Iterable[Samples]], Iterator[Window | None]]
"""Cuts audio of which all counts, as `cut` and `pack` do."""


def cut_stretches(
    blocks: Iterable[Samples], stretches: Sequence[Stretch], cut_one: CutOne
) -> Iterator[Window | None]:
    """Cut stretches of audio into windows, none of which holds parts of two.

    No more blocks are asked for than the last stretch needs. What lies beyond the audio's end is
    empty.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        stretches: at least one, in order.
        cut_one: called with the blocks of each.

    Yields:
        Windows, of which only the very last may hold no samples, and None as `pack` does.
    """
    reader, left_out_s = _Reader(blocks), 0.0
    for number, (start_s, end_s) in enumerate(stretches, start=1):
        before = reader.at
        yield from _skipped(reader.until(_sample(start_s)))
        left_out_s += (reader.at - before) / SAMPLE_RATE
        begin_s = reader.at / SAMPLE_RATE
        for window in cut_one(reader.until(_sample(end_s))):
            if window is None:
                yield None
                continue
            left_out_s += window.left_out_s
            last = window.last and number == len(stretches)
            if len(window.samples) or last:
                yield dataclasses.replace(
                    window, start_s=begin_s + window.start_s, last=last, left_out_s=left_out_s
                )
                left_out_s = 0.0


def _sample(time_s: float) -> int:
    return round(time_s * SAMPLE_RATE) if math.isfinite(time_s) else sys.maxsize


def _skipped(blocks: Iterable[Samples]) -> Iterator[None]:
    """Yield None now and then, while audio goes by that nobody wants."""
    waited = 0
    for block in blocks:
        waited += len(block)
        if waited >= BREATHER:
            waited = 0
            yield None


class _Reader:
    """Hands out audio, as much as is asked for."""

    def __init__(self, blocks: Iterable[Samples]) -> None:
        self.at = 0  # samples handed out
        self._blocks = iter(blocks)
        self._rest = np.zeros(0, np.float32)

    def until(self, end: int) -> Iterator[Samples]:
        """Yield the blocks that are left before a sample of the whole, or the audio's end."""
        while self.at < end:
            if not len(self._rest):
                block = next(self._blocks, None)
                if block is None:
                    return
                self._rest = block
            wanted = end - self.at
            part, self._rest = self._rest[:wanted], self._rest[wanted:]
            self.at += len(part)
            yield part
