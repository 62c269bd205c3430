"""An utterance: the audio between audio-start and audio-stop, and its options."""

import dataclasses
import io
from typing import Annotated, Literal

from pydantic import Field

from serve.contract.errors import AudioError, AudioLimitError
from serve.speech.raw import wav_header

MAX_S = 300.0
MAX_BYTES = 2**24  # with `serve.wyoming.bridge.MAX_CONNECTIONS`: 256 MiB in all


@dataclasses.dataclass(frozen=True)
class TranscribeOptions:
    """The options of the event `transcribe`, which may precede an utterance."""

    name: str | None = None  # the model
    language: str | None = None
    transcript_names: tuple[str, ...] | None = None  # to boost
    transcript_terms: tuple[str, ...] | None = None

    @property
    def keywords(self) -> tuple[str, ...]:
        """Return the words to boost, names first."""
        words = (*(self.transcript_names or ()), *(self.transcript_terms or ()))
        return tuple(word for word in words if word.strip())


@dataclasses.dataclass(frozen=True)
class AudioFormat:
    """The format of samples, from the events audio-start and audio-chunk."""

    rate: Annotated[int, Field(ge=1_000, le=384_000)]  # Hz
    width: Literal[1, 2, 3, 4]  # bytes per sample; one byte is unsigned
    channels: Annotated[int, Field(ge=1, le=8)]

    @property
    def bytes_per_s(self) -> int:
        """Return the bytes per second, of all channels."""
        return self.rate * self.width * self.channels


class WyomingUtterance:
    """The samples of an utterance, as a WAV file in memory.

    Args:
        format: the format of the samples.
    """

    def __init__(self, format: AudioFormat) -> None:
        self._format = format
        self._file = io.BytesIO()
        self._bytes = 0  # of samples
        self._write_header()

    @property
    def seconds(self) -> float:
        """Return the seconds of audio so far."""
        return self._bytes / self._format.bytes_per_s

    def add(self, format: AudioFormat, samples: bytes) -> None:
        """Append samples.

        Raises:
            AudioError: the format differs from that of the utterance.
            AudioLimitError: the utterance is too long.
        """
        if format != self._format:
            raise AudioError(
                f"audio-chunk has {format}; expected {self._format}, as at the start of the audio"
            )
        self._bytes += len(samples)
        self._file.write(samples)
        if self.seconds > MAX_S or self._bytes > MAX_BYTES:
            raise AudioLimitError(
                f"the audio has {self.seconds:.0f} s and {self._bytes} bytes; expected at most "
                f"{MAX_S:g} s and {MAX_BYTES} bytes before audio-stop"
            )

    def wav(self) -> io.BytesIO:
        """Return the WAV file of the samples so far.

        Raises:
            AudioError: the audio ends within a sample.
        """
        frame = self._format.width * self._format.channels
        if self._bytes % frame:
            raise AudioError(f"the audio has {self._bytes} bytes; expected a multiple of {frame}")
        self._file.seek(0)
        self._write_header()
        return self._file

    def _write_header(self) -> None:
        format = self._format
        self._file.write(wav_header(format.rate, format.channels, format.width, self._bytes))
