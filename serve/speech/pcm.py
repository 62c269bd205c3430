"""A source of samples, and the one that needs no library: 16-bit WAV, the commonest upload."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from serve.contract.messages import Samples
from serve.speech import containers
from serve.speech.layouts import UNKNOWN, Layout

EXPECTED = (
    "expected a recording: WAV, FLAC, MP3, OGG, MP4, M4A, WebM, AAC, AMR, WMA, CAF or another "
    "common format"
)
BLOCK_VALUES = 1 << 16  # samples decoded at a time, all channels together


class Source(Protocol):
    """An opened file."""

    rate: int  # the rate of its first block; the ones after it may have another
    channels: int
    layout: Layout  # of the latest block; before the first one, of that
    declared_s: float | None  # None where the file does not say, or not reliably
    present_s: float | None  # what the file can hold, where that is known before it is decoded
    tolerance_s: float  # how much less than declared may be decoded; 0 where lengths are exact

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """Yield blocks in order: the rate in Hz, and samples of shape (n, channels)."""
        ...

    def close(self) -> None:
        """Free the decoder."""
        ...


class Pcm16:
    """A WAV file of 16-bit samples.

    libsndfile would give the same samples, but in eight times the time: it calls back into Python
    for every 4 KiB, and so keeps other threads waiting.
    """

    tolerance_s = 0.0
    layout = UNKNOWN

    def __init__(self, audio: containers.Bytes, header: containers.Pcm16Header) -> None:
        channels = header.channels
        present = min(header.declared_bytes, len(audio) - header.begin) // (2 * channels)
        self._audio, self._begin = audio, header.begin
        self._end = header.begin + present * 2 * channels
        self.rate, self.channels = header.rate, channels
        declared = header.declared_bytes // (2 * channels)
        self.declared_s = declared / header.rate if header.rate else None
        self.present_s = present / header.rate if header.rate else None

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        size = max(1, BLOCK_VALUES // self.channels) * 2 * self.channels
        for start in range(self._begin, self._end, size):
            part = self._audio[start : min(start + size, self._end)]
            block = np.frombuffer(part, "<i2").astype(np.float32).reshape(-1, self.channels)
            block *= 1 / 32768
            yield self.rate, block

    def close(self) -> None:
        """See `Source`."""
