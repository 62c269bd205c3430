"""Audio files, opened by the library that knows them, as blocks of what is in them.

libsndfile reads WAV, AIFF, FLAC, OGG and MP3; FFmpeg, through PyAV, reads MP4, M4A, WebM, AAC,
AU, WAV streams without a length, and OGG or MP3 files one behind the other. Libraries get the file
through a meter, which ends it for them where reading has cost too much.

They are C, and take what memory and time a file makes them take: `serve.speech.sandbox` runs this
in processes that end with their file.
"""

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any

import av
import soundfile

from serve.errors import AudioError, EarshotError
from serve.messages import Samples
from serve.speech import containers
from serve.speech.audio import samples_of
from serve.speech.meter import Limits, Meter, MeteredFile, never
from serve.speech.pcm import BLOCK_VALUES, EXPECTED, Pcm16, Source

_CHUNKED_FORMATS = ("WAV", "WAVEX", "AIFF")
_SNDFILE_FORMATS = (*_CHUNKED_FORMATS, "FLAC", "OGG", "MP3")
_JOINED = {"OGG": containers.ogg_has_several_streams, "MP3": containers.mp3_goes_on}
"""Whether a file of a format is several, one behind the other."""
# NOTE: FFmpeg knows formats that are lists of files and addresses to open. A client must not make
# the server open anything, so only these formats are tried and no protocol may be used.
_FFMPEG_FORMATS = "mov,matroska,aac,ogg,flac,wav,au,mpegts"
_FFMPEG_TOLERANCE_S = 0.25


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read once from its beginning.

    NOTE: `SoundFile.read` seeks to where it already is after each block of a seekable file. In an
    MP3 that loses the bits that one frame borrows from those before it: up to a whole frame of
    wrong samples at each block. In a FLAC stream of unknown length it fails.
    """

    def seekable(self) -> bool:
        return False


def decode(
    audio: containers.Bytes, limits: Limits, stopped: Callable[[], bool] = never
) -> Generator[Samples, None, None]:
    """As `serve.speech.audio.decode`, but in this process.

    Raises:
        MemoryError: there was too little for it.
    """
    meter = Meter(limits, stopped)
    return meter.steps(_decoded(audio, meter))


def _decoded(audio: containers.Bytes, meter: Meter) -> Generator[Samples, None, None]:
    yield from samples_of(open_source(audio, meter), meter)


def open_source(audio: containers.Bytes, meter: Meter) -> Source:
    """Open a file with whatever knows it.

    Raises:
        AudioError: nothing knows it, it has no sound, or its header tells that it is cut short.
        MemoryError: there was too little for it.
    """
    try:
        return _opened(audio, meter)
    except (EarshotError, MemoryError):
        raise
    except Exception as error:
        head = audio[:8].hex(" ")
        raise AudioError(
            f"audio of {len(audio)} bytes that begin with {head} is no audio file known here, "
            f"or is cut short; {EXPECTED}"
        ) from error


def _opened(audio: containers.Bytes, meter: Meter) -> Source:
    if (header := containers.pcm16(audio)) is not None:
        return Pcm16(audio, header)
    try:
        file = _ForwardFile(MeteredFile(audio, meter))
    except soundfile.LibsndfileError:
        return _FFmpeg(audio, meter)
    # A WAV header that was never filled in; libsndfile takes it for an empty file.
    endless = file.frames == 0 and audio[4:8] in (b"\0" * 4, b"\xff" * 4)
    if file.format not in _SNDFILE_FORMATS or endless:
        file.close()
        return _FFmpeg(audio, meter)
    found = _SndFile(audio, file)
    if file.format in _JOINED and _JOINED[file.format](audio):
        found.close()  # libsndfile would read the first alone
        return _FFmpeg(audio, meter, file.format.lower())
    return found


class _SndFile:
    """A file that libsndfile reads."""

    tolerance_s = 0.0

    def __init__(self, audio: containers.Bytes, file: Any) -> None:
        self._file = file
        self.rate: int = file.samplerate
        self.channels: int = file.channels
        frames = _declared_frames(audio, file.format, file.frames)
        self.declared_s = None if frames is None or not self.rate else frames / self.rate
        # Compressed formats repeat what their header declares.
        told = file.format in _CHUNKED_FORMATS and self.rate
        self.present_s = file.frames / self.rate if told else None

    def blocks(self) -> Iterator[Samples]:
        size = max(1, BLOCK_VALUES // self._file.channels)
        while True:
            block: Samples = self._file.read(size, dtype="float32", always_2d=True)
            if not len(block):
                return
            yield block

    def close(self) -> None:
        self._file.close()


def _declared_frames(audio: containers.Bytes, file_format: str, frames: int) -> int | None:
    """Samples that the file ought to hold; None where it does not say.

    Raises:
        AudioError: an OGG file that ends in the middle of a page.
    """
    if file_format == "OGG" and not containers.last_ogg_page_is_whole(audio):
        raise AudioError("audio is cut short: its last OGG page is not whole; send the whole file")
    if file_format == "MP3" and not containers.mp3_states_its_length(audio):
        return None
    if frames > 1 << 60:  # how libsndfile says that a FLAC stream does not tell
        return None
    if file_format in _CHUNKED_FORMATS:
        declared, present = containers.sample_bytes(audio)
        if present and present < declared < containers.STREAM_BYTES:
            return math.ceil(frames * declared / present)
    return frames


class _FFmpeg:
    """A file that FFmpeg reads.

    Raises:
        AudioError: on opening, if FFmpeg does not know it either or it has no sound.
    """

    tolerance_s = _FFMPEG_TOLERANCE_S
    present_s: float | None = None

    def __init__(
        self, audio: containers.Bytes, meter: Meter, formats: str = _FFMPEG_FORMATS
    ) -> None:
        options = {"format_whitelist": formats, "protocol_whitelist": "none"}
        self._file = av.open(
            MeteredFile(audio, meter), "r", options=options, metadata_errors="ignore"
        )
        streams = self._file.streams.audio
        if not streams or streams[0].codec_context is None:
            self._file.close()
            raise AudioError(f"audio has no sound track that can be decoded; {EXPECTED}")
        self._stream = streams[0]
        # In the calling thread, whose processor time is counted.
        self._stream.codec_context.thread_count = 1
        self.rate: int = self._stream.rate
        self.channels: int = self._stream.codec_context.channels
        self.declared_s = self._declared_s()

    def _declared_s(self) -> float | None:
        name = self._file.format.name
        if (
            name.startswith(("mov", "wav", "au"))
            and self._stream.duration
            and self._stream.time_base
        ):
            return float(self._stream.duration * self._stream.time_base)
        if name.startswith("matroska") and len(self._file.streams) == 1 and self._file.duration:
            return float(self._file.duration) / 1_000_000  # FFmpeg's unit is 1 us
        return None

    def blocks(self) -> Iterator[Samples]:
        # NOTE: not planar: PyAV reads past the end of a planar frame of more than 8 channels.
        to_float, layout = av.AudioResampler(format="flt"), ""
        for frame in self._frames():
            if frame.sample_rate != self.rate:
                raise AudioError(
                    f"audio changes from {self.rate} to {frame.sample_rate} samples a second; "
                    "expected one rate"
                )
            if frame.layout.name != layout:  # as a broadcast's does: the next part is stereo
                to_float, layout = av.AudioResampler(format="flt"), frame.layout.name
            for part in to_float.resample(frame):
                values: Samples = part.to_ndarray()  # type: ignore[assignment]
                yield values.reshape(part.samples, -1)

    def _frames(self) -> Iterator[av.AudioFrame]:
        for packet in self._file.demux(self._stream):
            try:
                yield from packet.decode()
            except av.InvalidDataError:
                if self._file.format.name != "mp3":
                    raise  # between two MP3 it is the second's tag, say: libsndfile resumes, too

    def close(self) -> None:
        self._file.close()
