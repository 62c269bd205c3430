"""Define sources of samples, and read 16-bit WAV, the most common upload, without a library."""

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
BLOCK_VALUES = 1 << 16  # samples per block, all channels together


class AudioSource(Protocol):
    """An opened audio file."""

    rate: int  # the rate of the first block; later blocks may have another
    channels: int
    layout: Layout  # the layout of the latest block; before the first block, of that one
    declared_s: float | None  # None if the file does not declare it reliably
    present_s: float | None  # the maximum from the file's size; None if unknown before decoding
    tolerance_s: float  # allowed difference to the declared length; 0 if lengths are exact

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """Yield blocks in order: the rate in Hz, and samples of shape (n, channels)."""
        ...

    def close(self) -> None: ...


class Pcm16:
    """A WAV file of 16-bit samples.

    libsndfile gives the same samples, but takes eight times as long: it calls Python for every
    4 KiB, which blocks other threads.
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
        pass
