"""An utterance, between audio-start and audio-stop, and the options of its transcription."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from serve.contract.errors import AudioError, AudioLimitError, OverloadedError
from serve.speech.raw import wav_header

MAX_S = 300.0
MAX_BYTES = 2**25

_PIECE_BYTES = 2**16  # at which a piece grows no more


class Budget:
    """The memory for the audio of all connections.

    Args:
        max_bytes: the maximum.
    """

    def __init__(self, max_bytes: int = 2**28) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0

    def take(self, size: int) -> None:
        """Take bytes from the budget.

        Raises:
            OverloadedError: too few are left.
        """
        if self._bytes + size > self.max_bytes:
            raise OverloadedError(
                f"{self._bytes} bytes of audio of all connections wait for audio-stop or a text; "
                f"expected at most {self.max_bytes}: try again later"
            )
        self._bytes += size

    def give_back(self, size: int) -> None:
        """Give bytes back to the budget."""
        self._bytes -= size


@dataclasses.dataclass(frozen=True)
class TranscribeOptions:
    """The options of the event `transcribe`, which may precede an utterance."""

    name: str | None = None  # of a model
    language: str | None = None
    transcript_names: tuple[str, ...] | None = None  # that may be said
    transcript_terms: tuple[str, ...] | None = None

    @property
    def keywords(self) -> tuple[str, ...]:
        """Words that may be said; names come first."""
        words = (*(self.transcript_names or ()), *(self.transcript_terms or ()))
        return tuple(word for word in words if word.strip())


@dataclasses.dataclass(frozen=True)
class AudioFormat:
    """The format of samples; it stands in the events audio-start and audio-chunk."""

    rate: Annotated[int, Field(ge=1_000, le=384_000)]  # Hz
    width: Literal[1, 2, 3, 4]  # bytes of a sample; of one byte it has no sign
    channels: Annotated[int, Field(ge=1, le=8)]

    @property
    def bytes_per_s(self) -> int:
        """Bytes a second, of all channels."""
        return self.rate * self.width * self.channels


class WyomingUtterance:
    """Samples as they come.

    Args:
        format: the samples' format.
        budget: pays for their memory until `close`.
    """

    def __init__(self, format: AudioFormat, budget: Budget) -> None:
        self._format = format
        self._budget = budget
        # One array that grows to 32 MiB would be copied again and again, and leave holes behind.
        self._pieces: list[bytes] = []
        self._bytes = 0

    @property
    def seconds(self) -> float:
        """Seconds that it has so far."""
        return self._bytes / self._format.bytes_per_s

    def add(self, format: AudioFormat, samples: bytes) -> None:
        """Add a piece that goes on from the last.

        Raises:
            AudioError: it is of another format.
            AudioLimitError: it is too much.
            OverloadedError: the budget has no room.
        """
        if format != self._format:
            raise AudioError(
                f"audio-chunk holds {format}, the audio began as {self._format}; expected the same"
            )
        self._budget.take(len(samples))
        self._bytes += len(samples)
        if self._pieces and len(self._pieces[-1]) < _PIECE_BYTES:
            self._pieces[-1] = b"".join((self._pieces[-1], samples))
        else:
            self._pieces.append(samples)
        if self.seconds > MAX_S or self._bytes > MAX_BYTES:
            raise AudioLimitError(
                f"the audio has {self.seconds:.0f} s and {self._bytes} bytes; expected at most "
                f"{MAX_S:g} s and {MAX_BYTES} bytes before audio-stop"
            )

    def close(self) -> None:
        """Drop the samples; may be called again."""
        self._budget.give_back(self._bytes)
        self._pieces, self._bytes = [], 0

    def wav(self) -> tuple[bytes, ...]:
        """Return a WAV file in pieces.

        Raises:
            AudioError: it ends within a sample.
        """
        frame, size = self._format.width * self._format.channels, self._bytes
        if size % frame:
            raise AudioError(f"the audio has {size} bytes; expected a multiple of {frame}")
        header = wav_header(self._format.rate, self._format.channels, self._format.width, size)
        return header, *self._pieces
