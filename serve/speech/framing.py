"""Cut the blocks of a decoder into windows of a fixed length."""

from collections.abc import Iterator

import numpy as np

from serve.contract.messages import Samples
from serve.speech.layouts import Layout

Framed = tuple[int, Layout, Samples]
"""The rate in Hz, the channel layout, and samples, float32 (n, channels)."""


class Framer:
    """A buffer that cuts blocks into windows of one rate and one layout.

    Args:
        per_s: windows per second; the last window before a change or the end may be shorter.
    """

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._held: list[Samples] = []
        self._count = 0
        self._kind: tuple[int, Layout, int] = (0, (), 0)  # rate, layout, channels

    def push(self, rate: int, layout: Layout, block: Samples) -> Iterator[Framed]:
        """Add a block, float32 (n, channels); yield the complete windows."""
        kind = (rate, layout, block.shape[1])
        if kind != self._kind:
            yield from self.finish()
            self._kind = kind
        self._held.append(block)
        self._count += len(block)
        length = max(1, rate // self._per_s)
        if self._count < length:
            return
        whole = np.concatenate(self._held) if len(self._held) > 1 else self._held[0]
        end = len(whole) - len(whole) % length
        self._held, self._count = [whole[end:]], len(whole) - end
        for start in range(0, end, length):
            yield rate, layout, whole[start : start + length]

    def finish(self) -> Iterator[Framed]:
        """Yield the last, incomplete window."""
        if self._count:
            yield self._kind[0], self._kind[1], np.concatenate(self._held)
        self._held, self._count = [], 0


def faded(old: Samples, new: Samples, rate: int) -> Samples:
    """Crossfade from old to new samples, both float32 (n,), over the first 10 ms."""
    n = min(len(new), max(1, rate // 100))
    ramp = np.linspace(0, 1, n, dtype=np.float32)
    return np.concatenate([old[:n] * (1 - ramp) + new[:n] * ramp, new[n:]])
