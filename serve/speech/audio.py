"""Audio files and raw samples to 16 kHz mono float32 in [-1, 1].

libsndfile reads WAV, AIFF, FLAC, OGG and MP3; FFmpeg, through PyAV, reads MP4, M4A, WebM, AAC,
AU, and WAV streams without a length. Channels are averaged; soxr changes the rate. Audio is read
block by block, so a small file that unpacks to a huge one is refused when it passes the limit.
Thread-safe; no temporary files.

A file that was cut short is refused wherever that can be known, since its text would look whole:
- WAV and AIFF: libsndfile corrects the length silently, so the chunk's own size is compared here.
  Sizes of 2 GiB and more stand in streams whose length was not known; these are read to their end.
- FLAC, and MP3 with a Xing header: fewer samples than declared, or an error while decoding. Without
  that header an MP3's length is only an estimate and is not relied on.
- OGG declares no length; its last page must be whole.
- MP4, RF64, AU and, with nothing but sound inside, WebM: more than 0.25 s less than declared (codec
  delay makes their lengths inexact). WebM from a live recorder declares none, nor does AAC alone.
"""

import io
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import av
import numpy as np
import soundfile
import soxr

from serve.errors import AudioError
from serve.messages import Samples
from serve.speech import containers
from serve.speech.features import SAMPLE_RATE

MIN_RATE = 1_000
MAX_RATE = 384_000

_BLOCK_VALUES = 1 << 16  # samples decoded at a time, all channels together
_MAX_PEAK = 8.0  # lossy decoders exceed 1 a little; values far beyond have the wrong scale
_SNDFILE_FORMATS = ("WAV", "WAVEX", "AIFF", "FLAC", "OGG", "MP3")
# NOTE: FFmpeg knows formats that are lists of files and addresses to open. A client must not make
# the server open anything, so only these formats are tried and no protocol may be used.
_FFMPEG_FORMATS = "mov,matroska,aac,ogg,flac,wav,au,mpegts"
_FFMPEG_OPTIONS = {"format_whitelist": _FFMPEG_FORMATS, "protocol_whitelist": "none"}
_FFMPEG_TOLERANCE_S = 0.25
_EXPECTED = "expected a WAV, FLAC, OGG, MP3, MP4, M4A, WebM or AAC file"


class _Source(Protocol):
    """An opened file."""

    rate: int
    declared_s: float | None  # None where the file does not say, or not reliably
    tolerance_s: float  # how much less than declared may be decoded; 0 where lengths are exact

    def blocks(self) -> Iterator[Samples]:
        """Mono samples of shape (n,) at `rate`."""
        ...

    def close(self) -> None:
        """Free the decoder."""
        ...


def decode(audio: bytes, max_s: float) -> Samples:
    """Decode a file's bytes.

    Args:
        audio: a whole audio file.
        max_s: refuse audio longer than this, in seconds.

    Returns:
        float32 (n,), 16 kHz mono in [-1, 1], n > 0.

    Raises:
        AudioError: empty, not audio, cut short, damaged, without samples, too long, with a sample
            rate or sample values that make no sense.
    """
    if not audio:
        raise AudioError(f"audio has 0 bytes; {_EXPECTED}")
    source = _open(audio)
    found_s = 0.0

    def counted() -> Iterator[Samples]:
        nonlocal found_s
        for block in source.blocks():
            found_s += len(block) / source.rate
            yield block

    try:
        _check_rate(source.rate)
        if source.declared_s is not None and source.declared_s > max_s:
            raise _too_long(f"lasts {source.declared_s:.1f} s", max_s)
        samples = _collect(counted(), source.rate, max_s)
    except (soundfile.LibsndfileError, av.FFmpegError) as error:
        raise _cut_short(found_s, source.declared_s) from error
    finally:
        source.close()
    tolerance_s = source.tolerance_s or 0.5 / source.rate  # half a sample, for sums are rounded
    if source.declared_s is not None and found_s < source.declared_s - tolerance_s:
        raise _cut_short(found_s, source.declared_s)
    if not len(samples):
        raise AudioError("audio holds no samples (0 s); expected some sound")
    return samples


def from_samples(samples: Samples, sample_rate: int, max_s: float) -> Samples:
    """Check raw samples and bring them to 16 kHz.

    Args:
        samples: float32 (n,), mono in [-1, 1].
        sample_rate: Hz.
        max_s: refuse audio longer than this, in seconds.

    Returns:
        float32 (n,), 16 kHz mono in [-1, 1], n > 0; never the array passed in.

    Raises:
        AudioError: wrong type, shape, rate, values or length.
    """
    if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.ndim != 1:
        found = getattr(samples, "dtype", type(samples).__name__)
        shape = getattr(samples, "shape", "")
        raise AudioError(f"audio samples are {found} {shape}; expected float32 of shape (n,)")
    _check_rate(sample_rate)
    if not len(samples):
        raise AudioError("audio holds no samples (0 s); expected some sound")
    if len(samples) / sample_rate > max_s:
        raise _too_long(f"lasts {len(samples) / sample_rate:.1f} s", max_s)
    starts = range(0, len(samples), _BLOCK_VALUES)
    return _collect((samples[i : i + _BLOCK_VALUES] for i in starts), sample_rate, max_s)


def _too_long(found: str, max_s: float) -> AudioError:
    return AudioError(f"audio {found}, the limit is {max_s:g} s; send it in parts")


def _cut_short(found_s: float, declared_s: float | None) -> AudioError:
    declared = "" if declared_s is None else f" of the {declared_s:.2f} s it declares"
    return AudioError(
        f"audio is cut short or damaged: {found_s:.2f} s{declared} can be decoded; "
        "send the whole file"
    )


def _check_rate(rate: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(f"audio has {rate} samples a second; expected {MIN_RATE} to {MAX_RATE}")


def _collect(blocks: Iterable[Samples], rate: int, max_s: float) -> Samples:
    """Check, resample and join blocks of mono samples; stops with an error beyond `max_s`."""
    resampler = None
    if rate != SAMPLE_RATE:
        resampler = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
    parts: list[Samples] = []
    count = 0
    for block in blocks:
        _check_values(block, count / rate)
        count += len(block)
        if count > max_s * rate:
            raise _too_long(f"lasts more than {max_s:g} s", max_s)
        parts.append(resampler.resample_chunk(block) if resampler else block)
    if resampler:  # what it holds back until it knows that nothing follows
        parts.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    joined = np.empty(sum(map(len, parts)), np.float32)
    end = len(joined)
    # Each part is freed once it is copied, so memory holds the audio once, not twice.
    while parts:
        part = parts.pop()
        np.clip(part, -1.0, 1.0, out=joined[end - len(part) : end])
        end -= len(part)
    return joined


def _check_values(block: Samples, start_s: float) -> None:
    peak = max(float(block.max(initial=0.0)), -float(block.min(initial=0.0)))
    if not math.isfinite(peak):
        raise AudioError(
            f"audio holds NaN or infinite samples after {start_s:.1f} s; expected finite numbers"
        )
    if peak > _MAX_PEAK:
        raise AudioError(
            f"audio samples reach {peak:.6g}; expected -1 to 1 (divide 16-bit samples by 32768)"
        )


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read once from its beginning.

    NOTE: `SoundFile.read` seeks to where it already is after each block of a seekable file. In an
    MP3 that loses the bits that one frame borrows from those before it: up to a whole frame of
    wrong samples at each block. In a FLAC stream of unknown length it fails.
    """

    def seekable(self) -> bool:
        return False


def _open(audio: bytes) -> _Source:
    if (header := containers.pcm16(audio)) is not None:
        return _Pcm16(audio, header)
    try:
        file = _ForwardFile(io.BytesIO(audio))
    except soundfile.LibsndfileError:
        return _FFmpeg(audio)
    # A WAV header that was never filled in; libsndfile takes it for an empty file.
    endless = file.frames == 0 and audio[4:8] in (b"\0" * 4, b"\xff" * 4)
    if file.format not in _SNDFILE_FORMATS or endless:
        file.close()
        return _FFmpeg(audio)
    return _SndFile(audio, file)


class _Pcm16:
    """A WAV file of 16-bit samples, the commonest upload.

    libsndfile would give the same samples, but in eight times the time: it calls back into Python
    for every 4 KiB, and so keeps other threads waiting.
    """

    tolerance_s = 0.0

    def __init__(self, audio: bytes, header: containers.Pcm16) -> None:
        channels = header.channels
        present = min(header.declared_bytes, len(audio) - header.begin) // (2 * channels)
        samples = np.frombuffer(audio, "<i2", present * channels, header.begin)
        self._frames = samples.reshape(-1, channels)
        self.rate = header.rate
        declared = header.declared_bytes // (2 * channels)
        self.declared_s = declared / header.rate if header.rate else None

    def blocks(self) -> Iterator[Samples]:
        size = max(1, _BLOCK_VALUES // self._frames.shape[1])
        for start in range(0, len(self._frames), size):
            block = self._frames[start : start + size].astype(np.float32)
            block *= 1 / 32768
            yield block.mean(axis=1) if block.shape[1] > 1 else block[:, 0]

    def close(self) -> None:
        pass


class _SndFile:
    """A file that libsndfile reads."""

    tolerance_s = 0.0

    def __init__(self, audio: bytes, file: Any) -> None:
        self._file = file
        self.rate: int = file.samplerate
        frames = _declared_frames(audio, file.format, file.frames)
        self.declared_s = None if frames is None or not self.rate else frames / self.rate

    def blocks(self) -> Iterator[Samples]:
        size = max(1, _BLOCK_VALUES // self._file.channels)
        while True:
            block: Samples = self._file.read(size, dtype="float32", always_2d=True)
            if not len(block):
                return
            yield block.mean(axis=1)

    def close(self) -> None:
        self._file.close()


def _declared_frames(audio: bytes, file_format: str, frames: int) -> int | None:
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
    if file_format in ("WAV", "WAVEX", "AIFF"):
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

    def __init__(self, audio: bytes) -> None:
        try:
            self._file = av.open(
                io.BytesIO(audio), "r", options=_FFMPEG_OPTIONS, metadata_errors="ignore"
            )
        except (av.FFmpegError, ValueError) as error:
            head = audio[:8].hex(" ")
            raise AudioError(
                f"audio of {len(audio)} bytes that begin with {head} is no audio file known here, "
                f"or is cut short; {_EXPECTED}"
            ) from error
        streams = self._file.streams.audio
        if not streams or streams[0].codec_context is None:
            self._file.close()
            raise AudioError(f"audio has no sound track that can be decoded; {_EXPECTED}")
        self._stream = streams[0]
        self.rate: int = self._stream.rate
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
        to_float = av.AudioResampler(format="flt")
        for frame in self._file.decode(self._stream):
            if frame.sample_rate != self.rate:
                raise AudioError(
                    f"audio changes from {self.rate} to {frame.sample_rate} samples a second; "
                    "expected one rate"
                )
            for part in to_float.resample(frame):
                yield part.to_ndarray().reshape(part.samples, -1).mean(axis=1, dtype=np.float32)

    def close(self) -> None:
        self._file.close()
