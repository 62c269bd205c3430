"""Limit the cost of decoding one request's audio, while it is decoded."""

import contextlib
import dataclasses
import io
import math
import time
from collections.abc import Callable, Generator
from typing import Any

from serve.contract.errors import AudioError, AudioLimitError, CancelledError, CutShortError
from serve.contract.messages import Samples
from serve.speech.containers import Bytes

MAX_HEADER_READS = 4_000  # reads by a library before the first sample; valid files need tens
PART_HEADER_READS = 200  # additional reads for each further part of a joined file


@dataclasses.dataclass(frozen=True)
class AudioLimits:
    """The limits and decoding options of a request's audio."""

    max_s: float  # transcriber.max_audio_s: maximum seconds of audio
    max_values: float = math.inf  # maximum decoded samples, all channels
    max_cpu_s: float = math.inf  # maximum CPU seconds of decoding
    partial: bool = False  # partial: accept truncated audio
    channel: int = -1  # the index of the only channel to decode; -1: the mix of all
    track: str = ""  # audio_track: number or language of the file's track; empty: the default one


def too_slow(limits: AudioLimits) -> AudioLimitError:
    """Return the error of a file that exceeds its CPU time."""
    return AudioLimitError(
        f"decoding the audio takes more CPU time than the {limits.max_cpu_s:g} s allowed; send it "
        "in parts, or as 16 kHz mono WAV"
    )


def never() -> bool:
    """Return False: the request is not cancelled."""
    return False


def ignore(text: str) -> None:
    """Ignore a warning; a default for callbacks."""


class DecodeBudget:
    """A counter of one request's decoding costs that stops the decoding at a limit.

    Decoding may continue on another thread after each block.

    Args:
        limits: the limits.
        stopped: returns whether the request was cancelled; called often.
        warn: called with each warning for the client about its audio.
    """

    def __init__(
        self,
        limits: AudioLimits,
        stopped: Callable[[], bool] = never,
        warn: Callable[[str], None] = ignore,
    ) -> None:
        self.limits = limits
        self.stopped, self._warn = stopped, warn
        self._part = ""  # the suffix of messages that names the part of a joined file
        self._values = 0
        self._header_reads = 0  # sum of all parts
        self._max_header_reads = MAX_HEADER_READS
        self._in_header = True
        self._spent_s = 0.0  # CPU time of the previous steps
        self._began_s = 0.0  # CPU time of the current thread at the step's start

    def metered(self, blocks: Generator[Samples, None, None]) -> Generator[Samples, None, None]:
        """Yield the blocks unchanged, and check the cost of each; closing this closes `blocks`.

        Raises:
            AudioError: decoding exceeds a limit, or the blocks raise it.
            CancelledError: the request was cancelled.
        """
        with contextlib.closing(blocks):
            while True:
                self._began_s = time.thread_time()
                try:
                    block = next(blocks, None)
                except AudioError:
                    self.check()  # a file stopped by the meter looks damaged to a library
                    raise
                self.check()
                self._spent_s, self._began_s = self._cpu_s(), math.inf
                if block is None:
                    return
                yield block

    def begin_part(self, number: int, count: int) -> None:
        """Start counting the header reads of a joined file's next part.

        Args:
            number: the part's number, from 1 on.
            count: the number of parts.
        """
        self._part = f" (part {number} of {count} joined files)"
        self._max_header_reads += PART_HEADER_READS
        self._in_header = True

    def end_header(self) -> None:
        """Stop counting header reads.

        Raises:
            AudioError, CancelledError: see `check`.
        """
        self.check()
        self._in_header = False

    def count(self, values: int) -> None:
        """Count decoded values.

        Raises:
            AudioLimitError: the total exceeds the limit.
        """
        self._values += values
        self.check_total(0)

    def check_total(self, values: float) -> None:
        """Check the limit for `values` more values, without counting them.

        Raises:
            AudioLimitError: the total would exceed the limit.
        """
        if (total := self._values + values) > (limit := self.limits.max_values):
            raise AudioLimitError(
                f"audio has at least {total / 1e6:.1f} million samples in all channels; expected "
                f"at most {limit / 1e6:g} million: send fewer channels, a lower sample rate or "
                "parts"
            )

    def warn(self, text: str) -> None:
        """Send a warning to the client."""
        self._warn(text + self._part)

    def cut_short(self, text: str, cause: Exception | None = None) -> None:
        """Handle truncated audio: warn if `limits.partial`, else raise an error.

        Args:
            text: a description of the truncation.
            cause: the library's error, if there was one.

        Raises:
            CutShortError: truncated audio is not accepted.
        """
        if not self.limits.partial:
            raise CutShortError(
                f"{text}{self._part}; send the whole file, or set partial = true to transcribe "
                "the available part"
            ) from cause
        self.warn(text)

    def may_read(self) -> bool:
        """Count a library's read of the file; return False if the library must get no more data."""
        self._header_reads += self._in_header
        return self._exceeded() is None

    def check(self) -> None:
        """Raise an error if a limit is exceeded.

        Raises:
            AudioError: the header needs too many reads.
            AudioLimitError: decoding takes too much CPU time.
            CancelledError: the request was cancelled.
        """
        if (error := self._exceeded()) is not None:
            raise error

    def _exceeded(self) -> AudioError | CancelledError | None:
        if self.stopped():
            return CancelledError("the request was cancelled while its audio was decoded")
        if self._in_header and self._header_reads > self._max_header_reads:
            return AudioError(
                f"audio's header is incomplete after {self._max_header_reads} reads; expected a "
                "file without thousands of chunks before its samples"
            )
        return too_slow(self.limits) if self._cpu_s() > self.limits.max_cpu_s else None

    def _cpu_s(self) -> float:
        return self._spent_s + max(0.0, time.thread_time() - self._began_s)


class MeteredFile(io.RawIOBase):
    """A file for a decoding library; it ends when its meter stops the decoding.

    Exceptions cannot pass through the libraries, so the meter raises them afterwards.
    """

    def __init__(self, audio: Bytes, meter: DecodeBudget) -> None:
        self._audio = audio
        self._meter = meter
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset; ignore an invalid one, which a damaged file may cause.

        Libraries check the returned offset. An exception would be lost in them, but log a traceback
        each time.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._audio)}.get(
            whence, 0
        )
        if 0 <= base + offset < 1 << 63:
            self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and return the bytes read; 0 once the meter stops the decoding."""
        if not self._meter.may_read():
            return 0
        data = self._audio[self._position : self._position + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
