"""Audio files, opened by the library that knows them, as blocks of what is in them.

libsndfile reads WAV, AIFF, FLAC, OGG, MP3, CAF of plain samples or ALAC, and some formats of
laboratories. FFmpeg (`serve.speech.ffmpeg`) reads what phones, browsers, broadcasts and corpora
make: MP4, M4A, WebM, AAC, AMR, AC3, WMA, SPHERE and others; WAV streams without a length, and OGG
or MP3 files one behind the other. Libraries get the file through a meter, which ends it for them
where reading has cost too much.

They are C, and take what memory and time a file makes them take: `serve.speech.sandbox` runs this
in processes that end with their file.
"""

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any

import soundfile

from serve.contract.errors import AudioError, EarshotError
from serve.contract.messages import Samples
from serve.speech import containers, ends, kinds, layouts, tracks
from serve.speech.audio import samples_of
from serve.speech.ffmpeg import FFmpegFile
from serve.speech.meter import Limits, Meter, MeteredFile, ignore, never
from serve.speech.pcm import BLOCK_VALUES, Pcm16, Source

_CHUNKED_FORMATS = ("WAV", "WAVEX", "AIFF")
# Not here: what FFmpeg reads as well, and tells the declared length of; and what libsndfile takes
# for sound besides recordings, samplers' instruments and matrices.
_LAB_FORMATS = ("IRCAM", "PVF", "AVR", "SVX", "PAF", "HTK", "WVE")
_SNDFILE_FORMATS = (*_CHUNKED_FORMATS, "FLAC", "OGG", "MP3", "CAF", *_LAB_FORMATS)
_ORDERED = ("OGG", "CAF")
"""Formats with an order of channels of their own, which FFmpeg knows."""
# Values of a block. One that cannot be read in whole is lost, so a damaged file wants small ones.
_SNDFILE_VALUES = BLOCK_VALUES >> 4
_JOINED = {"OGG": containers.ogg_has_several_streams, "MP3": containers.mp3_goes_on}
"""Checks whether a file of a format is several, one behind the other."""
_LAYOUTS = {
    "WAV": layouts.wav_layout,
    "WAVEX": layouts.wav_layout,
    "FLAC": layouts.flac_layout,
}


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read once from its beginning.

    NOTE: `SoundFile.read` seeks to where it already is after each block of a seekable file. In an
    MP3 that loses the bits that one frame borrows from those before it: up to a whole frame of
    wrong samples at each block. In a FLAC stream of unknown length it fails.
    """

    def seekable(self) -> bool:
        return False


def decode(
    audio: containers.Bytes,
    limits: Limits,
    stopped: Callable[[], bool] = never,
    warn: Callable[[str], None] = ignore,
) -> Generator[Samples, None, None]:
    """Decode as `serve.speech.audio.decode` does, but in this process.

    Raises:
        MemoryError: there was too little for it.
    """
    meter = Meter(limits, stopped, warn)
    return meter.steps(_decoded(audio, meter))


def _decoded(audio: containers.Bytes, meter: Meter) -> Generator[Samples, None, None]:
    yield from samples_of((open_source(part, meter) for part in [audio]), meter)


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
        raise AudioError(kinds.refusal(audio)) from error


def _opened(audio: containers.Bytes, meter: Meter) -> Source:
    if (header := containers.pcm16_header(audio)) is not None:
        return Pcm16(audio, header)
    if ends.is_cut_off(audio):
        meter.cut_short("audio is cut short: it ends before its last part does")
    try:
        file = _ForwardFile(MeteredFile(audio, meter))
    except soundfile.LibsndfileError:
        return FFmpegFile(audio, meter)
    # A WAV header that was never filled in; libsndfile takes it for an empty file.
    endless = file.frames == 0 and audio[4:8] in (b"\0" * 4, b"\xff" * 4)
    if file.format not in _SNDFILE_FORMATS or endless:
        file.close()
        return FFmpegFile(audio, meter)
    if file.format in _JOINED and _JOINED[file.format](audio):
        file.close()  # libsndfile would read the first alone
        return FFmpegFile(audio, meter, file.format.lower())
    if file.channels > 2 and file.format in _ORDERED:
        file.close()
        return FFmpegFile(audio, meter, file.format.lower())
    tracks.check_only(meter.limits.track, file.format)
    return _SndFile(audio, file)


class _SndFile:
    """A file that libsndfile reads."""

    tolerance_s = 0.0

    def __init__(self, audio: containers.Bytes, file: Any) -> None:
        self._file = file
        self.rate: int = file.samplerate
        self.channels: int = file.channels
        layout_of = _LAYOUTS.get(file.format)
        self.layout = layout_of(audio, file.channels) if layout_of else layouts.UNKNOWN
        frames = _declared_frames(audio, file.format, file.frames)
        self.declared_s = None if frames is None or not self.rate else frames / self.rate
        # Compressed formats repeat what their header declares.
        known = file.format in _CHUNKED_FORMATS and self.rate
        self.present_s = file.frames / self.rate if known else None

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        size = max(1, _SNDFILE_VALUES // self._file.channels)
        while True:
            block: Samples = self._file.read(size, dtype="float32", always_2d=True)
            if not len(block):
                return
            yield self.rate, block

    def close(self) -> None:
        self._file.close()


def _declared_frames(audio: containers.Bytes, file_format: str, frames: int) -> int | None:
    """Count the samples that the file ought to hold; None where it does not say."""
    if file_format == "MP3" and not containers.mp3_states_its_length(audio):
        return None
    if frames > 1 << 60:  # how libsndfile says that a FLAC stream does not tell
        return None
    if file_format in _CHUNKED_FORMATS:
        declared, present = containers.sample_bytes(audio)
        if present and present < declared < containers.STREAM_BYTES:
            return math.ceil(frames * declared / present)
    return frames
