"""Read files with FFmpeg, through PyAV, in formats that libsndfile does not fully support.

This module lists the formats and decoders that clients' files may use. FFmpeg has about 350
formats, among them playlists with files and URLs to open, scripts, images and screen capture. Each
is attack surface for a malicious file.
"""

import itertools
from collections.abc import Iterator

import av
import numpy as np
from av.codec import codecs_available
from av.stream import Disposition

from serve.contract.errors import AudioError, EarshotError
from serve.contract.messages import Samples
from serve.speech import file_types, layouts, tracks
from serve.speech.clock import FileClock
from serve.speech.containers import Bytes
from serve.speech.meter import DecodeBudget, MeteredFile
from serve.speech.pcm import BLOCK_VALUES, EXPECTED
from serve.speech.tracks import Track

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
_PLAIN = tuple(sorted(name for name in codecs_available if name.startswith("pcm_")))
_DECLARING = ("mov", "wav", "au", "nistsphere", "wv", "tta", "ape")
"""Formats with the length of a track in the header, which FFmpeg reports."""
_DECLARING_WHOLE = ("matroska", "flv")
"""Formats with only the file's length in the header; the video may be longer than the audio."""
_MICROSECONDS = 1_000_000  # per second; FFmpeg's unit of a file's times
_CLOCKED = ("matroska", "mov", "mpegts", "mpeg", "flv", "asf")
"""Formats with timestamps in packets. In others FFmpeg computes times from the bytes before."""
_MIN_BYTES_PER_S = 250.0
"""Files with fewer bytes per second have gaps, so their declared length includes silence."""
_NOT_MAIN = (
    Disposition.comment
    | Disposition.visual_impaired
    | Disposition.descriptions
    | Disposition.karaoke
    | Disposition.clean_effects
    | Disposition.dependent
)
_STREAMS = ("mp3", "aac", "ac3", "eac3")
"""Formats that consist of frames only, so that a part of a stream is a valid file."""


class FFmpegFile:
    """A `serve.speech.pcm.AudioSource` that FFmpeg reads.

    Args:
        audio: the file.
        meter: measures the cost of reading.
        demuxers: the formats to try; by default all of `DEMUXERS`.

    Raises:
        AudioError: the file has no audio that can be decoded.
        OptionError: the file does not have the requested track.
        Exception: FFmpeg's error if the file has none of the formats.
    """

    tolerance_s = 0.25  # codec delay makes lengths inexact
    present_s: float | None = None

    def __init__(self, audio: Bytes, meter: DecodeBudget, *demuxers: str) -> None:
        options = {
            "format_whitelist": ",".join(demuxers or DEMUXERS),
            "codec_whitelist": ",".join(_DECODERS + _PLAIN),
            "protocol_whitelist": "none",
        }
        self._meter = meter
        self._file = av.open(
            MeteredFile(audio, meter), "r", options=options, metadata_errors="ignore"
        )
        self.format = self._file.format.name
        try:
            self._stream = self._picked_stream()
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
            self._look_ahead()
        self.declared_s = self._declared_s(len(audio))

    def _picked_stream(self) -> av.AudioStream:
        streams = self._file.streams.audio
        if not streams:
            raise AudioError(f"the file has no audio track; {EXPECTED}")
        found = [_track(stream) for stream in streams]
        wanted = self._meter.limits.track
        place = tracks.pick(found, wanted)
        if not found[place].readable:
            codec = streams[place].codec_context
            raise AudioError(file_types.undecoded("unknown" if codec is None else codec.name))
        if len(found) > 1 and not wanted:
            self._meter.warn(tracks.others(found, place))
        return streams[place]

    def _declared_s(self, size: int) -> float | None:
        """Return the declared seconds, from the file's first timestamp on."""
        declared_s = None
        if self.format.startswith(_DECLARING) and self._stream.duration and self._stream.time_base:
            declared_s = float(self._stream.duration * self._stream.time_base)
        alone = len(self._file.streams) == 1
        if self.format.startswith(_DECLARING_WHOLE) and alone and self._file.duration:
            # Some files declare the end's timestamp instead of a duration.
            start, end = self._file.start_time or 0, self._file.duration
            declared_s = (end - start if 0 < start < end else end) / _MICROSECONDS
        if declared_s is not None and size < declared_s * _MIN_BYTES_PER_S:
            too_long = declared_s > self._meter.limits.max_s
            return None if too_long and self.format.startswith(_CLOCKED) else declared_s
        return declared_s

    def _look_ahead(self) -> None:
        """Take the track's properties from its first frame if FFmpeg's probing missed them."""
        first = next(self._decoded, None)
        if first is not None:
            self._decoded = itertools.chain([first], self._decoded)
            self.rate, self.layout = first.sample_rate, _layout(first.layout)
            self.channels = len(first.layout.channels)

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        clock = self._clock()
        try:
            yield from self._timed(clock)
        except Exception:
            self._tell(clock)
            raise
        self._tell(clock)

    def _timed(self, clock: FileClock | None) -> Iterator[tuple[int, Samples]]:
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
                if clock is not None:
                    yield from self._silence(clock, frame, block)
                yield frame.sample_rate, block

    def _clock(self) -> FileClock | None:
        if not self.format.startswith(_CLOCKED):
            return None
        start, alone = self._file.start_time, len(self._file.streams) == 1
        start_s = None if start is None or alone else start / _MICROSECONDS
        return FileClock(start_s, self._meter.limits.max_s)

    def _silence(
        self, clock: FileClock, frame: av.AudioFrame, block: Samples
    ) -> Iterator[tuple[int, Samples]]:
        rate, skipped_s = frame.sample_rate, clock.skipped_s
        if not rate:
            return
        begins_s = clock.begins_s
        count = round(rate * clock.silence_before(frame.time, len(block) / rate))
        if self.declared_s is not None:
            # The declared duration includes gaps, but not the silence before the audio.
            self.declared_s += clock.begins_s - begins_s - (clock.skipped_s - skipped_s)
        most = max(1, BLOCK_VALUES // block.shape[1])
        for at in range(0, count, most):
            yield rate, np.zeros((min(most, count - at), block.shape[1]), np.float32)

    def _tell(self, clock: FileClock | None) -> None:
        for text in clock.warnings() if clock is not None else ():
            self._meter.warn(text)

    def _frames(self) -> Iterator[av.AudioFrame]:
        begun, error = False, None
        for packet in self._file.demux(self._stream):
            try:
                for frame in packet.decode():
                    begun = True
                    yield frame
            except av.InvalidDataError as found:
                # Ignore errors between two MP3 files, such as at the second one's tag, and at the
                # beginning of streams, which may begin inside a frame.
                if self.format != "mp3" and (begun or self.format not in _STREAMS):
                    raise
                error = found
        if error is not None and not begun:
            raise error

    def close(self) -> None:
        self._file.close()


def _layout(layout: av.AudioLayout) -> layouts.Layout:
    return layouts.known(tuple(channel.name for channel in layout.channels))


def _track(stream: av.AudioStream) -> Track:
    codec = stream.codec_context
    readable = codec is not None and codec.codec.name in _DECODERS + _PLAIN
    name = "unknown" if codec is None else codec.codec.name
    count = 0 if codec is None else codec.channels
    sound = {0: "", 1: ", mono", 2: ", stereo"}.get(count, f", {count} channels")
    return Track(
        stream.language or "",
        name + sound,
        bool(stream.disposition & Disposition.default),
        not stream.disposition & _NOT_MAIN,
        readable,
    )
