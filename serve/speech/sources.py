"""Open audio files with libsndfile or FFmpeg, and decode them to blocks.

libsndfile reads WAV, AIFF, FLAC, OGG, MP3, CAF of plain samples or ALAC, and some laboratory
formats. FFmpeg (`serve.speech.ffmpeg`) reads the formats of phones, browsers, broadcasts and
corpora: MP4, M4A, WebM, AAC, AMR, AC3, WMA, SPHERE and others. It also reads joined MP3 files.
Libraries read the file through a meter, which pretends that the file ends if reading costs too
much.

Before a library reads a file, `serve.speech.repair` separates joined files and corrects a wrong
size of a WAV file's samples.

Malicious files can make these C libraries use much memory and time, so `serve.speech.sandbox` runs
this module in one process per file.
"""

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any

import soundfile

from serve.contract.errors import AudioError, EarshotError
from serve.contract.messages import Samples
from serve.speech import channels, containers, ffmpeg, file_types, repair
from serve.speech.audio import BLOCK_VALUES, AudioSource, Pcm16, samples_of
from serve.speech.containers import Bytes, FileSlice
from serve.speech.ffmpeg import FFmpegFile, Track
from serve.speech.meter import AudioLimits, DecodeBudget, MeteredFile, ignore, never

_CHUNKED_FORMATS = ("WAV", "WAVEX", "AIFF")
# Without the formats for which FFmpeg also reports the declared length, and without libsndfile's
# formats for instruments of samplers and for matrices.
_LAB_FORMATS = ("IRCAM", "PVF", "AVR", "SVX", "PAF", "HTK", "WVE")
_SNDFILE_FORMATS = (*_CHUNKED_FORMATS, "FLAC", "OGG", "MP3", "CAF", *_LAB_FORMATS)
_ORDERED = ("OGG", "CAF")
"""Formats with a channel order of their own, which libsndfile does not convert."""
# Values per block. A block with a read error is lost, so blocks are small.
_SNDFILE_VALUES = BLOCK_VALUES >> 4
# A file of unknown format is an MP3 stream if this share of its first bytes, without an ID3 tag, is
# frames.
_MIN_STREAM_SHARE = 0.5
_STREAM_BYTES = 1 << 20


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read sequentially.

    NOTE: `SoundFile.read` seeks to its current position after each block of a seekable file. An MP3
    thereby loses the bits that a frame borrows from previous ones: up to a whole frame of samples
    is wrong at each block. In a FLAC stream of unknown length the seek fails.
    """

    def seekable(self) -> bool:
        return False


def decode(
    audio: Bytes,
    limits: AudioLimits,
    stopped: Callable[[], bool] = never,
    warn: Callable[[str], None] = ignore,
) -> Generator[Samples, None, None]:
    """Decode a file in this process; see `serve.speech.audio.decode`.

    Raises:
        MemoryError: the process ran out of memory.
    """
    meter = DecodeBudget(limits, stopped, warn)
    return meter.metered(samples_of(_opened_parts(audio, meter), meter))


def _opened_parts(audio: Bytes, meter: DecodeBudget) -> Iterator[AudioSource]:
    """Find the parts of a file, which may be joined, and open them on demand."""
    parts = repair.split(audio, meter.check)
    for number, part in enumerate(parts, 1):
        if len(parts) > 1:
            meter.begin_part(number, len(parts))
        try:
            yield open_source(part, meter)
        except AudioError as error:
            meter.check()  # a file stopped by the meter looks damaged to a library
            if len(parts) == 1 or not meter.limits.partial:
                raise
            meter.warn(str(error))


def open_source(audio: Bytes, meter: DecodeBudget) -> AudioSource:
    """Open a file with the library that supports its format.

    Raises:
        AudioError: no library supports it, it has no audio, or its header shows a truncation.
        MemoryError: the process ran out of memory.
    """
    try:
        return _opened(audio, meter)
    except (EarshotError, MemoryError):
        raise
    except Exception as error:
        raise AudioError(file_types.refusal(audio)) from error


def _opened(audio: Bytes, meter: DecodeBudget) -> AudioSource:
    audio, warning = repair.corrected(audio)
    if warning:
        meter.warn(warning)
    if (header := containers.pcm16_header(audio)) is not None:
        ffmpeg.choose_track([Track("", "WAV")], meter.limits.track)
        return Pcm16(audio, header)
    if containers.is_cut_off(audio):
        meter.cut_short("audio is cut short: it ends inside a part of the container")
    try:
        file = _ForwardFile(MeteredFile(audio, meter))
    except soundfile.LibsndfileError:
        return _ffmpeg_file(audio, meter)
    if file.format not in _SNDFILE_FORMATS:
        demuxers = ffmpeg.DEMUXERS
    elif file.format == "MP3" and _is_joined_mp3(audio, meter):
        demuxers = ("mp3",)  # libsndfile would read the first MP3 alone
    elif file.channels > 2 and file.format in _ORDERED:
        demuxers = (file.format.lower(),)
    else:
        ffmpeg.choose_track([Track("", file.format)], meter.limits.track)
        if file.format == "AIFF" and containers.is_aiff_continued(audio):
            meter.warn(
                "the file goes on after the samples that its AIFF header declares; the rest is not "
                "transcribed: correct the header, or send WAV"
            )
        return _SndFile(audio, file)
    file.close()
    return FFmpegFile(audio, meter, demuxers)


def _ffmpeg_file(audio: Bytes, meter: DecodeBudget) -> AudioSource:
    """Open a file with FFmpeg, even if it is an MP3 stream that begins inside a frame."""
    try:
        return FFmpegFile(audio, meter)
    except (EarshotError, MemoryError):
        raise
    except Exception:
        begin = containers.id3_bytes(audio)  # a tag may hold a picture of a megabyte
        stream = FileSlice(audio, begin, begin + _STREAM_BYTES)
        _, share = ffmpeg.mp3_frames(stream, meter)
        if share < _MIN_STREAM_SHARE:
            raise
    return FFmpegFile(audio, meter, ["mp3"])


def _is_joined_mp3(audio: Bytes, meter: DecodeBudget) -> bool:
    is_followed = containers.another_mp3_follows(audio)
    return ffmpeg.mp3_frames(audio, meter)[0] > 1 if is_followed is None else is_followed


class _SndFile:
    """A file opened by libsndfile."""

    tolerance_s = 0.0

    def __init__(self, audio: Bytes, file: Any) -> None:
        self._file = file
        self.rate: int = file.samplerate
        self.channels: int = file.channels
        self.layout = channels.declared_layout(file.format, audio, file.channels)
        frames = _declared_frames(audio, file.format, file.frames)
        self.declared_s = None if frames is None or not self.rate else frames / self.rate
        # For compressed formats libsndfile repeats the declaration of the header.
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


def _declared_frames(audio: Bytes, file_format: str, frames: int) -> int | None:
    """Return the declared number of frames; None if the file declares none."""
    if file_format == "MP3" and not containers.mp3_declares_length(audio):
        return None
    if frames > 1 << 60:  # libsndfile's value for a FLAC stream of unknown length
        return None
    if file_format in _CHUNKED_FORMATS:
        declared, present = containers.sample_bytes(audio)
        if present and present < declared < containers.STREAM_BYTES:
            return math.ceil(frames * declared / present)
    return frames
