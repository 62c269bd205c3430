"""Files that FFmpeg reads, through PyAV: of formats that libsndfile does not know in whole.

Which of its formats and decoders a client's file may reach is listed here by name. FFmpeg knows
some 350 formats; among them are lists of files and addresses to open, scripts, pictures and
captures of the screen, and each is code that a hostile file could aim at.
"""

from collections.abc import Iterator

import av
from av.codec import codecs_available

from serve.contract.errors import AudioError
from serve.contract.messages import Samples
from serve.speech import kinds
from serve.speech.containers import Bytes
from serve.speech.meter import Meter, MeteredFile
from serve.speech.pcm import EXPECTED

# Files in which people keep speech: of phones (mov: MP4, M4A, 3GP; amr, caf), browsers (matroska:
# WebM, too), broadcasts (mpegts, mpeg, ac3, eac3, flv), computers (wav, au, asf: WMA, avi, w64,
# voc), archives (flac, wv, tta, ape), corpora (nistsphere). Each is told by its first bytes and
# holds its sound itself. Not here: playlists and whatever else names files (hls, concat, dash, asx,
# sdp), devices, pictures, texts, and formats without a signature, which anything may be taken for.
DEMUXERS = tuple(
    "mov matroska aac ogg flac wav au mpegts mpeg amr caf ac3 eac3 asf avi flv w64 voc wv tta ape "
    "nistsphere".split()
)
# Decoders of sound in them. Pictures are not even looked at: a film's would be, to tell its size.
_DECODERS = tuple(
    "aac aac_latm ac3 alac amrnb amrwb ape dca eac3 evrc flac g722 gsm gsm_ms ilbc "
    "libopencore_amrnb libopencore_amrwb libopus mace3 mace6 mlp mp1 mp1float mp2 mp2float mp3 "
    "mp3float nellymoser opus qcelp qdm2 speex truehd truespeech tta vorbis wavpack "
    "wmalossless wmapro wmav1 wmav2 wmavoice adpcm_ima_qt adpcm_ima_wav adpcm_ms "
    "adpcm_swf adpcm_yamaha".split()
)
_PLAIN = tuple(sorted(name for name in codecs_available if name.startswith("pcm_")))
_DECLARING = ("mov", "wav", "au", "nistsphere", "wv", "tta", "ape")
"""Formats whose header says how long a track lasts, and FFmpeg repeats it."""
_DECLARING_WHOLE = ("matroska", "flv")
"""The same of the file, whose pictures may last longer than its sound."""


_STREAMS = ("mp3", "aac", "ac3", "eac3")
"""Formats that are frames alone, so that a part of a stream is a file as well."""


class FFmpegFile:
    """A file that FFmpeg reads: a `serve.speech.pcm.Source`.

    Args:
        audio: the file.
        meter: of what reading it costs.
        demuxers: formats that are tried.

    Raises:
        AudioError: FFmpeg knows it, but it has no sound that can be decoded.
        Exception: FFmpeg's own, where it is of no such format.
    """

    tolerance_s = 0.25  # codec delay makes lengths inexact
    present_s: float | None = None

    def __init__(self, audio: Bytes, meter: Meter, *demuxers: str) -> None:
        options = {
            "format_whitelist": ",".join(demuxers or DEMUXERS),
            "codec_whitelist": ",".join(_DECODERS + _PLAIN),
            "protocol_whitelist": "none",
        }
        self._file = av.open(
            MeteredFile(audio, meter), "r", options=options, metadata_errors="ignore"
        )
        self.format = self._file.format.name
        streams = self._file.streams.audio
        if not streams:
            self._file.close()
            raise AudioError(f"audio has no sound track; {EXPECTED}")
        self._stream = streams[0]
        codec = self._stream.codec_context
        if codec is None or codec.codec.name not in _DECODERS + _PLAIN:
            kind = "nothing known" if codec is None else codec.codec.name
            self._file.close()
            raise AudioError(kinds.undecoded(kind))
        codec.thread_count = 1  # in the calling thread, whose processor time is counted
        self.rate: int = self._stream.rate
        self.channels: int = codec.channels
        self.declared_s = self._declared_s()

    def _declared_s(self) -> float | None:
        if self.format.startswith(_DECLARING) and self._stream.duration and self._stream.time_base:
            return float(self._stream.duration * self._stream.time_base)
        alone = len(self._file.streams) == 1
        if self.format.startswith(_DECLARING_WHOLE) and alone and self._file.duration:
            return float(self._file.duration) / 1_000_000  # FFmpeg's unit is 1 us
        return None

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """See `Source`."""
        # NOTE: not planar: PyAV reads past the end of a planar frame of more than 8 channels.
        to_float, kind = av.AudioResampler(format="flt"), (0, "")
        for frame in self._frames():
            if (frame.sample_rate, frame.layout.name) != kind:
                # A broadcast's next programme may have another rate or other channels.
                kind = frame.sample_rate, frame.layout.name
                to_float = av.AudioResampler(format="flt")
            for part in to_float.resample(frame):
                values: Samples = part.to_ndarray()  # type: ignore[assignment]
                yield frame.sample_rate, values.reshape(part.samples, -1)

    def _frames(self) -> Iterator[av.AudioFrame]:
        begun, error = False, None
        for packet in self._file.demux(self._stream):
            try:
                for frame in packet.decode():
                    begun = True
                    yield frame
            except av.InvalidDataError as found:
                # Between two MP3 it is the second's tag, for example. Streams may begin inside a
                # frame.
                if self.format != "mp3" and (begun or self.format not in _STREAMS):
                    raise
                error = found
        if error is not None and not begun:
            raise error

    def close(self) -> None:
        """See `Source`."""
        self._file.close()
