"""Cut selected intervals of a recording into windows, with times in the whole recording."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE
from serve.speech.packing import BREATHER
from serve.speech.windows import AudioWindow

Stretch = tuple[float, float]
"""Start and end in seconds; the end may be infinite."""

CutOne = Callable[[Iterable[Samples]], Iterator[AudioWindow | None]]
"""A function that cuts a whole recording, such as `cut` or `pack`."""


def cut_stretches(
    blocks: Iterable[Samples], stretches: Sequence[Stretch], cut_one: CutOne
) -> Iterator[AudioWindow | None]:
    """Cut each interval of the audio into its own windows.

    Blocks are read only up to the end of the last interval. Intervals beyond the audio's end are
    empty.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
        stretches: at least one interval, in order.
        cut_one: called with the blocks of each interval.

    Yields:
        Windows; only the last one may have no samples. None as in `pack`.
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
    """Discard blocks; yield None after each `BREATHER` samples."""
    waited = 0
    for block in blocks:
        waited += len(block)
        if waited >= BREATHER:
            waited = 0
            yield None


class _Reader:
    """A reader of blocks that can stop at any sample."""

    def __init__(self, blocks: Iterable[Samples]) -> None:
        self.at = 0  # samples read
        self._blocks = iter(blocks)
        self._rest = np.zeros(0, np.float32)

    def until(self, end: int) -> Iterator[Samples]:
        """Yield blocks up to a sample of the recording, or to its end."""
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
