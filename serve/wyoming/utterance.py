"""An utterance, between audio-start and audio-stop, and the options of its transcription."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from serve.contract.errors import AudioError, AudioLimitError
from serve.speech.raw import wav_header

MAX_S = 300.0
MAX_BYTES = 2**25


@dataclasses.dataclass(frozen=True)
class Options:
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


class Utterance:
    """Samples as they come."""

    def __init__(self, format: AudioFormat) -> None:
        self._format = format
        self._samples = bytearray()

    @property
    def seconds(self) -> float:
        """Seconds that it has so far."""
        return len(self._samples) / self._format.bytes_per_s

    def add(self, format: AudioFormat, samples: bytes) -> None:
        """Add a piece that goes on from the last.

        Raises:
            AudioError: it is of another format.
            AudioLimitError: it is too much.
        """
        if format != self._format:
            raise AudioError(
                f"audio-chunk holds {format}, the audio began as {self._format}; expected the same"
            )
        self._samples += samples
        if self.seconds > MAX_S or len(self._samples) > MAX_BYTES:
            raise AudioLimitError(
                f"the audio has {self.seconds:.0f} s and {len(self._samples)} bytes; expected at "
                f"most {MAX_S:g} s and {MAX_BYTES} bytes before audio-stop"
            )

    def wav(self) -> tuple[bytes, bytearray]:
        """Return a WAV file's two parts.

        Raises:
            AudioError: it ends within a sample.
        """
        frame, size = self._format.width * self._format.channels, len(self._samples)
        if size % frame:
            raise AudioError(f"the audio has {size} bytes; expected a multiple of {frame}")
        header = wav_header(self._format.rate, self._format.channels, self._format.width, size)
        return header, self._samples
