"""A tone in every format, for tests of decoders."""

import dataclasses
import functools
import io
from fractions import Fraction

import av
import numpy as np
import soundfile
from av.stream import Disposition

from serve.speech import audio
from serve.speech.meter import AudioLimits
from serve.speech.vad import FRAME

RATE = 16_000
SECONDS = 3.0


class Ear:
    """Hear speech wherever samples are not 0; stands for the model of `serve.speech.vad`."""

    def probabilities(self, samples: np.ndarray) -> np.ndarray:
        return (np.abs(samples.reshape(-1, FRAME)).max(axis=1) > 0).astype(np.float32)


def tone(rate: int = RATE, seconds: float = SECONDS, hertz: int = 300) -> np.ndarray:
    """A tone at half of full scale, float32 (n,)."""
    time_s = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * time_s)).astype(np.float32)


def noisy() -> np.ndarray:
    """The tone, no four bytes of which look like a name or like nothing."""
    noise = np.random.default_rng(0).uniform(-0.2, 0.2, int(SECONDS * RATE))
    return (tone() + noise).astype(np.float32)


def tones_of(samples: np.ndarray, seconds: float = SECONDS) -> list[int]:
    """The loudest tone in the middle second of each `seconds` of 16 kHz samples, in Hz."""
    middles = np.arange(seconds / 2, len(samples) / RATE, seconds)
    parts = [samples[int((at - 0.5) * RATE) :][:RATE] for at in middles]
    return [int(np.argmax(np.abs(np.fft.rfft(part)))) for part in parts if len(part) == RATE]


def decode(data: bytes, max_s: float = 100.0, **limits) -> tuple[np.ndarray, list[str]]:
    """All samples of a file, and the warnings; keywords are those of `AudioLimits`."""
    told: list[str] = []
    return audio.join_blocks(
        audio.decode(data, AudioLimits(max_s, **limits), warn=told.append)
    ), told


def encode(samples: np.ndarray, fmt: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=fmt, subtype=subtype)
    return file.getvalue()


SNDFILE = """
WAV-PCM_16 WAV-FLOAT WAV-ULAW WAV-IMA_ADPCM WAVEX-PCM_24 AIFF-PCM_16 FLAC-PCM_16 OGG-VORBIS
OGG-OPUS MP3-MPEG_LAYER_III RF64-PCM_16 AU-PCM_16 AU-ULAW CAF-PCM_16 CAF-ALAC_16 W64-PCM_16
VOC-PCM_16 NIST-PCM_16 NIST-ULAW IRCAM-PCM_16 PVF-PCM_16 AVR-PCM_16 SVX-PCM_16 PAF-PCM_16
HTK-PCM_16 WVE-ALAW
""".split()
"""Formats that libsndfile writes, each with its subtype."""

FFMPEG = """
mp4-aac mp4-aac-fragments adts-aac webm-libopus webm-libopus-live ogg-libopus mp3-libmp3lame
mp3-libmp3lame-endless mpegts-aac mov-pcm_s16le caf-adpcm_ima_qt ac3-ac3 eac3-eac3 matroska-ac3
asf-wmav2 avi-libmp3lame mpeg-mp2 flv-aac wv-wavpack tta-tta
""".split()
"""Formats that FFmpeg writes, each with its codec; some with a variant."""

VARIANTS = {
    "fragments": {"movflags": "frag_keyframe+empty_moov", "frag_duration": "200000"},
    "live": {"live": "1"},
    "endless": {"write_xing": "0"},
}

PHONES = ("amr", "3gp")
"""Formats in which phones record: speech of 8 kHz at 12.2 kbit/s."""


@functools.cache
def recording(name: str, seconds: float = SECONDS) -> bytes:
    """Encode the tone in a format of `SNDFILE`, `FFMPEG` or `PHONES`; those of FFmpeg are 3 s."""
    if name in SNDFILE:
        rate = 8_000 if name == "WVE-ALAW" else RATE
        return encode(tone(rate, seconds), *name.split("-"), rate)
    if name in PHONES:
        return encode_ffmpeg(name, "libopencore_amrnb", 8_000, "mono", 12_200)
    return encode_variant(name, 44_100 if name in ("asf-wmav2", "flv-aac") else 48_000)


def encode_variant(name: str, rate: int, layout: str = "stereo", hertz: int = 300) -> bytes:
    """Encode the tone in a format of `FFMPEG`."""
    fmt, codec, *variant = name.split("-")
    options = VARIANTS[variant[0]] if variant else {}
    return encode_ffmpeg(fmt, codec, rate, layout, hertz=hertz, **options)


def wide_amr(frames: int = 150) -> bytes:
    """AMR-WB, of which there is no encoder here: frames of 20 ms of whatever random bits say."""
    random = np.random.default_rng(0)
    return b"#!AMR-WB\n" + b"".join(b"\x44" + random.bytes(60) for _ in range(frames))


@dataclasses.dataclass
class Sound:
    """An audio track: what is in it, and when."""

    samples: np.ndarray  # float32 (n,) or (n, channels)
    rate: int = 24_000
    layout: str = "mono"
    codec: str = "aac"
    bit_rate: int | None = None
    begins_s: float = 0.0
    gap: tuple[float, float] = (0.0, 0.0)  # seconds of sound before it, and its length
    default: bool | None = None
    language: str = ""


def tracks(
    fmt: str, *sounds: Sound, picture_s: float = 0.0, options: dict[str, str] | None = None
) -> bytes:
    """Make a file of several tracks with packets in order of time."""
    file = io.BytesIO()
    with av.open(file, "w", format=fmt, options=options or {}) as container:
        codec = "flv" if fmt == "flv" else "mpeg4"
        packets = _picture(container, codec, picture_s) if picture_s else []
        streams = [_stream(container, sound) for sound in sounds]
        container.start_encoding()
        for stream, sound in zip(streams, sounds, strict=True):
            packets += _packets(stream, sound)
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            container.mux(packet)
    return file.getvalue()


def _picture(container, codec: str, seconds: float) -> list:
    stream = container.add_stream(codec, rate=25)
    stream.width = stream.height = 32
    packets = []
    for number in range(round(25 * seconds)):
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        frame.pts, frame.time_base = number, Fraction(1, 25)
        packets += stream.encode(frame)
    return packets + stream.encode(None)


def _stream(container, sound: Sound):
    stream = container.add_stream(sound.codec, rate=sound.rate, layout=sound.layout)
    if sound.bit_rate is not None:
        stream.bit_rate = sound.bit_rate
    if sound.default is not None:
        stream.disposition = Disposition.default if sound.default else Disposition(0)
    if sound.language:
        stream.metadata["language"] = sound.language
    return stream


def _packets(stream, sound: Sound) -> list:
    values = (np.clip(sound.samples, -1, 1) * 32767).astype(np.int16).reshape(1, -1)
    whole = av.AudioFrame.from_ndarray(values, format="s16", layout=sound.layout)
    whole.sample_rate = sound.rate
    resampler = av.AudioResampler(
        format=stream.format,
        layout=sound.layout,
        rate=sound.rate,
        frame_size=stream.codec_context.frame_size or 1024,
    )
    packets, at = [], 0
    gap_at, gap_s = sound.gap
    for frame in [*resampler.resample(whole), *resampler.resample(None)]:
        late_s = sound.begins_s + (gap_s if at >= gap_at * sound.rate else 0.0)
        frame.pts, frame.time_base = at + round(late_s * sound.rate), Fraction(1, sound.rate)
        at += frame.samples
        packets += stream.encode(frame)
    return packets + stream.encode(None)


def encode_ffmpeg(
    fmt: str,
    codec: str,
    rate: int = 48_000,
    layout: str = "stereo",
    bit_rate: int = 64_000,
    hertz: int = 300,
    **options: str,
) -> bytes:
    """The tone in a format that libsndfile cannot write."""
    sound = np.repeat(tone(rate, hertz=hertz)[:, None], 1 if layout == "mono" else 2, axis=1)
    return tracks(fmt, Sound(sound, rate, layout, codec, bit_rate), options=options)
