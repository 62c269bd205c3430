"""Read files with FFmpeg, through PyAV, in formats that libsndfile does not fully support.

This module lists the formats and decoders that clients' files may use. FFmpeg has about 350
formats, among them playlists with files and URLs to open, scripts, images and screen capture. Each
is attack surface for a malicious file.

A request names an audio track by its number, from 1 on, or by a language. Otherwise the file's
default track is chosen, as by players, or the first one.

Audio may start after the video, recorders pause, and packets get lost. Silence fills the gaps
between timestamps, so that a transcript has the file's times. Time 0 is the beginning of the file,
whatever its first timestamp is.
"""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import av
import numpy as np
from av.codec import codecs_available
from av.container import InputContainer
from av.stream import Disposition

from serve.contract.errors import AudioError, EarshotError, OptionError, shown
from serve.contract.messages import Samples
from serve.speech import channels
from serve.speech.audio import BLOCK_VALUES
from serve.speech.containers import Bytes
from serve.speech.file_types import EXPECTED
from serve.speech.languages import FROM_ISO_639_2, language_code
from serve.speech.meter import DecodeBudget, MeteredFile

_MIN_GAP_S = 0.25  # between two frames; the jitter of timestamps is smaller
_MIN_DRIFT_S = 0.5  # sum of smaller gaps that is filled
_MAX_BACKWARD_S = 1.0  # timestamps that go back by more belong to another recording
_MAX_GAP_S = 1800.0  # a longer gap also means another recording


@dataclasses.dataclass
class FileClock:
    """A counter that returns the silence to insert before each frame of a file's audio.

    Args:
        start_s: timestamp of the file's beginning; None: the first frame's timestamp.
        max_s: maximum seconds of audio and silence together.
    """

    start_s: float | None
    max_s: float
    lead_in_s: float = 0.0  # silence before the first frame
    unfilled_s: float = 0.0  # sum of gaps that are too long to be filled
    _position_s: float = 0.0  # audio and silence so far
    _end_s: float | None = None  # timestamp of the last frame's end
    _gaps: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # start, length
    _jumps: list[str] = dataclasses.field(default_factory=list)

    def silence_before(self, time_s: float | None, duration_s: float) -> float:
        """Return the seconds of silence to insert before the next frame.

        Args:
            time_s: the frame's timestamp; None: unknown.
            duration_s: the frame's duration.
        """
        gap_s = 0.0 if time_s is None else self._gap_s(time_s)
        self._position_s += gap_s + duration_s
        if time_s is not None:
            self._end_s = time_s + duration_s
        elif self._end_s is not None:
            self._end_s += duration_s
        return gap_s

    def warnings(self) -> list[str]:
        """Return warnings about gaps."""
        texts = []
        if self.lead_in_s:
            texts.append(
                f"the audio starts {self.lead_in_s:.2f} s after the file; times count from the "
                "beginning of the file"
            )
        if self._gaps:
            count, filled_s = len(self._gaps), sum(length_s for _, length_s in self._gaps)
            texts.append(
                f"the file's timestamps have {count} gap{'s' * (count != 1)} without audio, "
                f"{filled_s:.2f} s in total, the first at {self._gaps[0][0]:.2f} s; silence fills "
                "them to keep the times correct"
            )
        if self._jumps:
            suffix = f" (and {len(self._jumps) - 1} times more)" if len(self._jumps) > 1 else ""
            texts.append(
                f"the file's timestamps jump ahead by {self._jumps[0]}{suffix}, too far to fill "
                "with silence; times continue as if there were no gap"
            )
        return texts

    def _gap_s(self, time_s: float) -> float:
        first = self._end_s is None
        if self.start_s is None:
            self.start_s = time_s
        missing_s = time_s - self.start_s - self._position_s
        since_frame_s = missing_s if self._end_s is None else time_s - self._end_s
        if missing_s < -_MAX_BACKWARD_S:  # another recording follows, with its own timestamps
            self.start_s += missing_s
            return 0.0
        if not (missing_s >= _MIN_DRIFT_S or min(missing_s, since_frame_s) >= _MIN_GAP_S):
            return 0.0
        if missing_s > _MAX_GAP_S or self._position_s + missing_s > self.max_s:
            self.start_s += missing_s
            self.unfilled_s += missing_s
            self._jumps.append(f"{missing_s:.1f} s at {self._position_s:.2f} s")
            return 0.0
        if first:
            self.lead_in_s = missing_s
        else:
            self._gaps.append((self._position_s, missing_s))
        return missing_s


_MAX_SHOWN = 16  # maximum tracks in a message
_MAX_LANGUAGE_CHARS = 16  # maximum characters of a language tag, which comes from the file

_UNKNOWN = ("", "und", "mis", "mul", "zxx")


@dataclasses.dataclass(frozen=True)
class Track:
    """An audio track, as described by its file."""

    language: str  # the file's language tag; empty: none
    kind: str  # codec and channels
    default: bool = False
    readable: bool = True


def choose_track(tracks: Sequence[Track], requested: str) -> int:
    """Return the index of the track to transcribe.

    Args:
        tracks: at least one track.
        requested: number or language; empty: the default track.

    Raises:
        OptionError: there is no such track; the message lists the tracks.
    """
    if not requested:
        return min(range(len(tracks)), key=lambda i: _rank(tracks[i]))
    if requested.isdecimal():
        number = int(requested)
        if 1 <= number <= len(tracks):
            return number - 1
    else:
        code = _code(requested)
        matching = [i for i, track in enumerate(tracks) if code and _code(track.language) == code]
        if matching:
            return min(matching, key=lambda i: _rank(tracks[i]))
    raise OptionError(
        f"audio_track = {shown(requested)}, but the file has no such track; expected one of "
        f"{_list_tracks(tracks)}"
    )


def other_tracks_warning(tracks: Sequence[Track], chosen: int) -> str:
    """Return the warning that one track of several was chosen by default."""
    unused = [i for i in range(len(tracks)) if i != chosen]
    return (
        f"the file has {len(tracks)} audio tracks; track {_describe(tracks, chosen)} is "
        f"transcribed, and not {_list_tracks(tracks, unused)}; set audio_track to choose another "
        "one"
    )


def _rank(track: Track) -> tuple[bool, bool]:
    return (not track.readable, not track.default)


def _code(language: str) -> str | None:
    """Return Whisper's code of a language, or the tag's first part in lower case."""
    first = language.strip().lower().replace("_", "-").partition("-")[0]
    if first in _UNKNOWN:
        return None
    return FROM_ISO_639_2.get(first) or language_code(language) or first


def _list_tracks(tracks: Sequence[Track], indices: Sequence[int] | None = None) -> str:
    listed = list(range(len(tracks)) if indices is None else indices)
    names = [_describe(tracks, i) for i in listed[:_MAX_SHOWN]]
    return ", ".join(names) + (", …" if len(listed) > _MAX_SHOWN else "")


def _describe(tracks: Sequence[Track], index: int) -> str:
    track = tracks[index]
    tag = "".join(c for c in track.language if c.isalnum() or c in "-_")[:_MAX_LANGUAGE_CHARS]
    language = "no language" if tag in _UNKNOWN else tag
    default = ", default" if track.default and len(tracks) > 1 else ""
    return f"{index + 1} ({language}, {track.kind}{default})"


# Formats of speech recordings: phones (mov: MP4, M4A, 3GP; amr, caf), browsers (matroska: also
# WebM), broadcasts (mpegts, mpeg, ac3, eac3, flv), computers (wav, au, asf: WMA, avi, w64, voc),
# archives (flac, wv, tta, ape), corpora (nistsphere). Each has a signature and contains its audio.
# Excluded: playlists and other formats that name files (hls, concat, dash, asx, sdp), devices,
# images, texts, and formats without a signature, which match any bytes.
DEMUXERS = tuple(
    "mov matroska aac ogg flac wav au mpegts mpeg amr caf ac3 eac3 asf avi flv w64 voc wv tta ape "
    "nistsphere".split()
)
# Audio decoders for these formats. Without video decoders FFmpeg does not probe the video.
_DECODERS = tuple(
    "aac aac_latm ac3 alac amrnb amrwb ape dca eac3 evrc flac g722 gsm gsm_ms ilbc "
    "libopencore_amrnb libopencore_amrwb libopus mace3 mace6 mlp mp1 mp1float mp2 mp2float mp3 "
    "mp3float nellymoser opus qcelp qdm2 speex truehd truespeech tta vorbis wavpack "
    "wmalossless wmapro wmav1 wmav2 wmavoice adpcm_ima_qt adpcm_ima_wav adpcm_ms "
    "adpcm_swf adpcm_yamaha".split()
)
_PCM_DECODERS = tuple(sorted(name for name in codecs_available if name.startswith("pcm_")))
_TRACK_LENGTH_FORMATS = ("mov", "wav", "au", "nistsphere", "wv", "tta", "ape")
"""Formats with the length of a track in the header, which FFmpeg reports."""
_FILE_LENGTH_FORMATS = ("matroska", "flv")
"""Formats with only the file's length in the header; the video may be longer than the audio."""
_MICROSECONDS = 1_000_000  # per second; FFmpeg's unit of a file's times
_TIMESTAMPED = ("matroska", "mov", "mpegts", "mpeg", "flv", "asf")
"""Formats with timestamps in packets. In others FFmpeg computes times from the bytes before."""
_MIN_BYTES_PER_S = 250.0
"""Files with fewer bytes per second have gaps, so their declared length includes silence."""
_FRAME_FORMATS = ("mp3", "aac", "ac3", "eac3")
"""Formats that consist of frames only, so that a part of a stream is a valid file."""
_MIN_MP3_FRAMES = 3  # minimum frames of a kind that damaged data does not contain
_MP3_BUFFER_BYTES = 1 << 20  # bytes per read of a whole MP3; the meter counts reads


class FFmpegFile:
    """A `serve.speech.audio.AudioSource` that FFmpeg reads.

    Args:
        audio: the file.
        meter: measures the cost of reading.
        demuxers: the formats to try.

    Raises:
        AudioError: the file has no audio that can be decoded.
        OptionError: the file does not have the requested track.
        Exception: FFmpeg's error if the file has none of the formats.
    """

    tolerance_s = 0.25  # codec delay makes lengths inexact
    present_s: float | None = None

    def __init__(
        self, audio: Bytes, meter: DecodeBudget, demuxers: Sequence[str] = DEMUXERS
    ) -> None:
        self._meter = meter
        self._file = _open(audio, meter, demuxers)
        self.format = self._file.format.name
        try:
            self._stream = self._choose_stream()
        except EarshotError:
            self._file.close()
            raise
        codec = self._stream.codec_context
        codec.thread_count = 1  # decode on the calling thread; its CPU time is measured
        self._decoded = self._frames()
        self.rate: int = self._stream.rate
        self.channels: int = codec.channels
        self.layout = _layout(codec.layout)
        if not self.rate:  # the audio starts too late for FFmpeg's probing
            self._read_first_frame()
        self.declared_s = self._declared_s(len(audio))

    def _choose_stream(self) -> av.AudioStream:
        streams = self._file.streams.audio
        if not streams:
            raise AudioError(f"the file has no audio track; {EXPECTED}")
        tracks = [_track(stream) for stream in streams]
        requested = self._meter.limits.track
        index = choose_track(tracks, requested)
        if not tracks[index].readable:
            codec = streams[index].codec_context
            name = "unknown" if codec is None else codec.name
            raise AudioError(f"audio's codec is {name}, which is not supported; {EXPECTED}")
        if len(tracks) > 1 and not requested:
            self._meter.warn(other_tracks_warning(tracks, index))
        return streams[index]

    def _declared_s(self, size: int) -> float | None:
        """Return the declared seconds, from the file's first timestamp on."""
        declared_s = None
        has_length = self.format.startswith(_TRACK_LENGTH_FORMATS)
        if has_length and self._stream.duration and self._stream.time_base:
            declared_s = float(self._stream.duration * self._stream.time_base)
        is_single = len(self._file.streams) == 1
        if self.format.startswith(_FILE_LENGTH_FORMATS) and is_single and self._file.duration:
            # Some files declare the end's timestamp instead of a duration.
            start, end = self._file.start_time or 0, self._file.duration
            declared_s = (end - start if 0 < start < end else end) / _MICROSECONDS
        if declared_s is not None and size < declared_s * _MIN_BYTES_PER_S:
            too_long = declared_s > self._meter.limits.max_s
            return None if too_long and self.format.startswith(_TIMESTAMPED) else declared_s
        return declared_s

    def _read_first_frame(self) -> None:
        """Take the track's properties from its first frame if FFmpeg's probing missed them."""
        first = next(self._decoded, None)
        if first is not None:
            self._decoded = itertools.chain([first], self._decoded)
            self.rate, self.layout = first.sample_rate, _layout(first.layout)
            self.channels = len(first.layout.channels)

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        clock: FileClock | None = None
        if self.format.startswith(_TIMESTAMPED):
            start, is_single = self._file.start_time, len(self._file.streams) == 1
            start_s = None if start is None or is_single else start / _MICROSECONDS
            clock = FileClock(start_s, self._meter.limits.max_s)
        error: Exception | None = None
        try:
            yield from self._with_silence(clock)
        except Exception as found:  # noqa: BLE001 - it is raised below
            error = found
        for text in clock.warnings() if clock is not None else ():
            self._meter.warn(text)
        if error is not None:
            raise error

    def _with_silence(self, clock: FileClock | None) -> Iterator[tuple[int, Samples]]:
        """Yield the audio, with silence for gaps between timestamps."""
        # NOTE: not planar: PyAV reads past the end of a planar frame of more than 8 channels.
        to_float, kind = av.AudioResampler(format="flt"), (0, "")
        for frame in self._decoded:
            if (frame.sample_rate, frame.layout.name) != kind:
                # The next programme of a broadcast may have another rate or other channels.
                kind = frame.sample_rate, frame.layout.name
                to_float = av.AudioResampler(format="flt")
                self.layout = _layout(frame.layout)
            for part in to_float.resample(frame):
                values: Samples = part.to_ndarray()  # type: ignore[assignment]
                block = values.reshape(part.samples, -1)
                if clock is not None and frame.sample_rate:
                    yield from self._silence(clock, frame, block)
                yield frame.sample_rate, block

    def _silence(
        self, clock: FileClock, frame: av.AudioFrame, block: Samples
    ) -> Iterator[tuple[int, Samples]]:
        rate, unfilled_s = frame.sample_rate, clock.unfilled_s
        lead_in_s = clock.lead_in_s
        count = round(rate * clock.silence_before(frame.time, len(block) / rate))
        if self.declared_s is not None:
            # The declared duration includes gaps, but not the silence before the audio.
            self.declared_s += clock.lead_in_s - lead_in_s - (clock.unfilled_s - unfilled_s)
        max_frames = max(1, BLOCK_VALUES // block.shape[1])
        for offset in range(0, count, max_frames):
            yield rate, np.zeros((min(max_frames, count - offset), block.shape[1]), np.float32)

    def _frames(self) -> Iterator[av.AudioFrame]:
        has_frames, error = False, None
        for packet in self._file.demux(self._stream):
            try:
                for frame in packet.decode():
                    has_frames = True
                    yield frame
            except av.InvalidDataError as found:
                # Ignore errors between two MP3 files, such as at the second one's tag, and at the
                # beginning of streams, which may begin inside a frame.
                if self.format != "mp3" and (has_frames or self.format not in _FRAME_FORMATS):
                    raise
                error = found
        if error is not None and not has_frames:
            raise error

    def close(self) -> None:
        self._file.close()


def mp3_frames(audio: Bytes, meter: DecodeBudget) -> tuple[int, float]:
    """Find the frames of an MP3.

    Returns:
        The number of kinds of frames: joined files may change their rate, or between mono and
        stereo. Damaged data may look like a frame, so a kind counts only if it is frequent. And the
        share of the bytes that are frames.
    """
    kinds, size = Counter[tuple[int, int, bool]](), 0
    with (
        contextlib.suppress(av.FFmpegError),
        _open(audio, meter, ["mp3"], _MP3_BUFFER_BYTES) as file,
    ):
        for packet in file.demux(audio=0):
            header = bytes(packet)[:4]
            if len(header) == 4 and header[0] == 0xFF:  # version and layer, rate, mono
                kinds[header[1] & 0x1E, header[2] & 0x0C, header[3] >= 0xC0] += 1
                size += packet.size
    return sum(count >= _MIN_MP3_FRAMES for count in kinds.values()), size / max(1, len(audio))


def _open(
    audio: Bytes, meter: DecodeBudget, demuxers: Sequence[str], buffer_bytes: int = 1 << 15
) -> InputContainer:
    options = {
        "format_whitelist": ",".join(demuxers),
        "codec_whitelist": ",".join(_DECODERS + _PCM_DECODERS),
        "protocol_whitelist": "none",
    }
    file = MeteredFile(audio, meter)
    return av.open(file, "r", options=options, metadata_errors="ignore", buffer_size=buffer_bytes)


def _layout(layout: av.AudioLayout) -> channels.Layout:
    return channels.known_layout(tuple(channel.name for channel in layout.channels))


def _track(stream: av.AudioStream) -> Track:
    codec = stream.codec_context
    name, count = ("unknown", 0) if codec is None else (codec.codec.name, codec.channels)
    sound = {0: "", 1: ", mono", 2: ", stereo"}.get(count, f", {count} channels")
    is_default = bool(stream.disposition & Disposition.default)
    readable = name in _DECODERS + _PCM_DECODERS
    return Track(stream.language or "", name + sound, is_default, readable)
