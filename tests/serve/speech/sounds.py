"""A tone in every format, for tests of decoders."""

import io

import av
import numpy as np
import soundfile

RATE = 16_000
SECONDS = 3.0


def tone(rate: int = RATE, seconds: float = SECONDS, hertz: int = 300) -> np.ndarray:
    """A tone at half of full scale, float32 (n,)."""
    time_s = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * time_s)).astype(np.float32)


def tones_of(samples: np.ndarray, seconds: float = SECONDS) -> list[int]:
    """The loudest tone in the middle second of each `seconds` of 16 kHz samples, in Hz."""
    middles = np.arange(seconds / 2, len(samples) / RATE, seconds)
    parts = [samples[int((at - 0.5) * RATE) :][:RATE] for at in middles]
    return [int(np.argmax(np.abs(np.fft.rfft(part)))) for part in parts if len(part) == RATE]


def encode(samples: np.ndarray, fmt: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=fmt, subtype=subtype)
    return file.getvalue()


def amr(fmt: str = "amr") -> bytes:
    """The tone as phones record speech: 8 kHz, 12.2 kbit/s."""
    return encode_ffmpeg(fmt, "libopencore_amrnb", 8_000, "mono", 12_200)


def wide_amr(frames: int = 150) -> bytes:
    """AMR-WB, of which there is no encoder here: frames of 20 ms of whatever random bits say."""
    random = np.random.default_rng(0)
    return b"#!AMR-WB\n" + b"".join(b"\x44" + random.bytes(60) for _ in range(frames))


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
    file = io.BytesIO()
    with av.open(file, "w", format=fmt, options=options) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        stream.bit_rate = bit_rate
        frame = av.AudioFrame.from_ndarray(
            (tone(rate, hertz=hertz)[None] * 32767).astype(np.int16), format="s16", layout="mono"
        )
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 1024
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            part.pts = None
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()
