"""Limits of what decoding one request's audio may cost, checked while it is decoded."""

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

MAX_HEADER_READS = 4_000  # of a library, before it gives the first sample; whole files take tens
PART_HEADER_READS = 200  # how many more each further part of a joined file may take

_SizedBuffer = Any  # typeshed's WriteableBuffer cannot be imported


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a request's audio may be."""

    max_s: float  # transcriber.max_audio_s: seconds that it lasts
    max_values: float = math.inf  # samples as decoded, of all channels
    max_cpu_s: float = math.inf  # seconds of processor time that decoding takes
    partial: bool = False  # partial: what is there of audio that was cut short is taken
    channel: int = -1  # that alone is decoded, of several; -1: all of them together
    track: str = ""  # audio_track: number or language of the file's track; empty: the default one


def too_slow(limits: Limits) -> AudioLimitError:
    """Return the error of a file that takes more than its processor time."""
    return AudioLimitError(
        f"decoding the audio takes more processor time than the {limits.max_cpu_s:g} s that "
        "are allowed; send it in parts, or as 16 kHz mono WAV"
    )


def never() -> bool:
    """Return False: nothing is stopped."""
    return False


def ignore(text: str) -> None:
    """Ignore a warning."""


class Meter:
    """Counts what decoding one request's audio costs, and ends it where that is too much.

    Decoding may go on in another thread after each block.

    Args:
        limits: what is too much.
        stopped: whether nobody wants the audio any more; asked often.
        warn: called with each sentence that the client should read about its audio.
    """

    def __init__(
        self,
        limits: Limits,
        stopped: Callable[[], bool] = never,
        warn: Callable[[str], None] = ignore,
    ) -> None:
        self.limits = limits
        self.stopped, self._warn = stopped, warn
        self._part = ""  # names the part of a joined file in what is told of it
        self._values = 0
        self._header_reads = 0  # of all parts
        self._max_header_reads = MAX_HEADER_READS
        self._in_header = True
        self._spent_s = 0.0  # in the steps before this one
        self._began_s = 0.0  # time of this step's thread at which it began

    def steps(self, blocks: Generator[Samples, None, None]) -> Generator[Samples, None, None]:
        """Yield the same blocks, each step timed and checked; closing this closes them.

        Raises:
            AudioError: decoding costs more than the limits allow, or the blocks' own.
            CancelledError: nobody wants the audio any more.
        """
        with contextlib.closing(blocks):
            while True:
                self._began_s = time.thread_time()
                try:
                    block = next(blocks, None)
                except AudioError:
                    self.check()  # a file that gives no more looks damaged
                    raise
                self.check()
                self._spent_s, self._began_s = self._cpu_s(), math.inf
                if block is None:
                    return
                yield block

    def begin_part(self, number: int, count: int) -> None:
        """Note that a library reads the header of a joined file's next part.

        Args:
            number: the part's, from 1 on.
            count: of all parts.
        """
        self._part = f" (part {number} of {count} that were joined)"
        self._max_header_reads += PART_HEADER_READS
        self._in_header = True

    def end_header(self) -> None:
        """Note that the header is read.

        Raises:
            AudioError, CancelledError: it cost too much; see `check`.
        """
        self.check()
        self._in_header = False

    def count(self, values: int) -> None:
        """Note that so many values were decoded.

        Raises:
            AudioLimitError: these are too many.
        """
        self._values += values
        self.refuse_values(0)

    def refuse_values(self, values: float) -> None:
        """Refuse audio that holds so many values beside those counted, if these are too many.

        Raises:
            AudioLimitError: they are.
        """
        if (total := self._values + values) > (limit := self.limits.max_values):
            raise AudioLimitError(
                f"audio holds {total / 1e6:.1f} million samples or more in all its channels, "
                f"expected at most {limit / 1e6:g} million; send fewer channels, a lower rate or "
                "parts"
            )

    def warn(self, text: str) -> None:
        """Pass on a warning."""
        self._warn(text + self._part)

    def cut_short(self, text: str, cause: Exception | None = None) -> None:
        """Note that the audio is cut short.

        Args:
            text: how that shows, and how much is there.
            cause: a library's error that told.

        Raises:
            CutShortError: whole audio is wanted.
        """
        if not self.limits.partial:
            raise CutShortError(
                f"{text}{self._part}; send the whole file, or ask with partial = true for the "
                "text of what is there"
            ) from cause
        self.warn(text)

    def may_read(self) -> bool:
        """Count a read of the file by a library; False: it gets nothing more."""
        self._header_reads += self._in_header
        return not (self.stopped() or self._endless_header or self._too_slow)

    def check(self) -> None:
        """Raise an error if something was too much.

        Raises:
            AudioLimitError: decoding costs more than the limits allow.
            CancelledError: nobody wants the audio any more.
        """
        if self.stopped():
            raise CancelledError("the request ended while its audio was decoded")
        if self._endless_header:
            raise AudioError(
                f"audio's header is not complete after {self._max_header_reads} reads; "
                "expected a file without thousands of chunks that are not sound"
            )
        if self._too_slow:
            raise too_slow(self.limits)

    @property
    def _endless_header(self) -> bool:
        return self._in_header and self._header_reads > self._max_header_reads

    @property
    def _too_slow(self) -> bool:
        return self._cpu_s() > self.limits.max_cpu_s

    def _cpu_s(self) -> float:
        return self._spent_s + max(0.0, time.thread_time() - self._began_s)


class MeteredFile(io.RawIOBase):
    """A file's bytes for a library, which end once their meter says so.

    An exception could not pass through the libraries; the meter raises it when they return.
    """

    def __init__(self, audio: Bytes, meter: Meter) -> None:
        self._audio = audio
        self._meter = meter
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Return at most `size` bytes; none once the meter has had enough."""
        if not self._meter.may_read():
            return b""
        end = len(self._audio) if size is None or size < 0 else self._at + size
        data = self._audio[self._at : end]
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; stay where it is none, as a damaged file may ask for.

        Libraries see that by the place returned. An error here would reach nobody but the log, to
        which it adds a traceback each time.
        """
        at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._audio)}.get(whence, 0)
        if 0 <= at + offset < 1 << 63:
            self._at = at + offset
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: _SizedBuffer) -> int:
        """Copy bytes into a buffer, and return how many; 0 once the meter has had enough."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
