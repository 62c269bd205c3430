"""Channels become one: by layout, the centre alone, the louder of two that cancel each other.

Channels that are speakers' own: what one repeats of another is not heard twice.
"""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.marks import sample
from tests.serve.speech.sounds import RATE, Sound, decode, encode, tracks

DATA = Path(__file__).parents[2] / "data"
FIVE_ONE = ("FL", "FR", "FC", "LFE", "BL", "BR")
SEVEN_ONE = (*FIVE_ONE, "SL", "SR")


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    samples, _ = decode((DATA / "en_two.wav").read_bytes())
    return samples


def music(n: int) -> np.ndarray:
    """Chords that change twice a second."""
    time_s = np.arange(n) / RATE
    root = 220 * 2 ** (np.floor(2 * time_s) * 5 % 12 / 12)
    chord = sum(np.sin(2 * np.pi * root * ratio * time_s) for ratio in (1, 1.25, 1.5))
    return (0.2 * chord).astype(np.float32)


def wav(channels: np.ndarray, mask: int | None) -> bytes:
    """A WAV file of 16 bits, extensible where it has a channel mask."""
    n = channels.shape[1]
    data = (np.clip(channels, -1, 1) * 32767).astype("<i2").tobytes()
    tag = 1 if mask is None else 0xFFFE
    fmt = struct.pack("<HHIIHH", tag, n, RATE, RATE * 2 * n, 2 * n, 16)
    if mask is not None:
        guid = bytes.fromhex("0100000000001000800000aa00389b71")
        fmt += struct.pack("<HHI", 22, 16, mask) + guid
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def surround(voice: np.ndarray, layout: tuple[str, ...]) -> np.ndarray:
    """The voice in the centre, music everywhere else."""
    other = music(len(voice))
    return np.stack([voice if name == "FC" else other for name in layout], axis=1)


def in_ffmpeg(fmt: str, codec: str, layout: str):
    def make(channels: np.ndarray) -> bytes:
        rate = 48_000
        channels = np.repeat(channels, rate // RATE, axis=0)  # what that adds is above 8 kHz
        return tracks(fmt, Sound(channels, rate, layout, codec))

    return make


MAKERS = {
    "M4A": (FIVE_ONE, in_ffmpeg("mp4", "aac", "5.1")),
    "7.1 WAV": (SEVEN_ONE, lambda x: wav(x, 0x63F)),
    "5.1 WAV, side": (FIVE_ONE, lambda x: wav(x, 0x60F)),
    "3.0 WAV": (("FL", "FR", "FC"), lambda x: wav(x, 0x7)),
    # The order of Vorbis is another one: FL FC FR.
    "Vorbis": (("FL", "FC", "FR", "BL", "BR", "LFE"), lambda x: encode(x, "OGG", "VORBIS")),
    "5.1 WAV, 24 bits": (FIVE_ONE, lambda x: encode(x, "WAVEX", "PCM_24")),
    "5.1 FLAC": (FIVE_ONE, lambda x: encode(x, "FLAC")),
    "AC3": (FIVE_ONE, in_ffmpeg("ac3", "ac3", "5.1(side)")),
    "E-AC3 in MPEG-TS": (FIVE_ONE, in_ffmpeg("mpegts", "eac3", "5.1(side)")),
}


@pytest.mark.parametrize("name", sample(MAKERS, 4))
def test_a_voice_in_the_front_centre_is_heard_alone(voice, name):
    layout, make = MAKERS[name]
    samples, (told,) = decode(make(surround(voice, layout)))
    n = min(len(samples), len(voice))
    loudest = np.corrcoef(_envelope(samples[:n]), _envelope(voice[:n]))[0, 1]
    assert loudest > 0.95
    assert "front centre" in told


def _envelope(samples: np.ndarray) -> np.ndarray:
    whole = samples[: len(samples) // 800 * 800]
    return np.sqrt((whole.reshape(-1, 800) ** 2).mean(axis=1))


def test_voices_on_every_side_stay(voice):
    """One speaker is in the centre, and then another on the left."""
    nothing = np.zeros_like(voice)
    channels = np.zeros((2 * len(voice), 6), np.float32)
    channels[:, 2] = np.concatenate([voice, nothing])
    channels[:, 0] = np.concatenate([nothing, voice])
    samples, _ = decode(encode(channels, "FLAC"))
    for part in (samples[: len(voice)], samples[len(voice) :]):
        assert np.corrcoef(_envelope(part), _envelope(voice))[0, 1] > 0.8


@pytest.mark.parametrize(
    ("place", "weight"), [(0, 1.0), (1, 1.0), (2, 0.5**0.5), (3, 0.0), (4, 0.5**0.5)]
)
def test_weights_of_a_downmix(place: int, weight: float):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4 * RATE).astype(np.float32)
    channels = np.zeros((len(noise), 6), np.float32)
    channels[:, place] = noise
    samples, told = decode(encode(channels, "FLAC", "PCM_24"))
    np.testing.assert_allclose(samples, noise * weight / (2 + 3 * 0.5**0.5), atol=1e-5)
    assert told == []


@pytest.mark.parametrize("channels", [3, 12])
def test_many_microphones_are_averaged(voice, channels: int):
    rng = np.random.default_rng(0)
    heard = voice[:, None] * rng.uniform(0.5, 1, channels).astype(np.float32)
    data = wav(heard, None)
    stored, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_allclose(decode(data)[0], stored.mean(axis=1), atol=1e-6)


def test_ordinary_stereo_is_the_mean_bit_by_bit(voice):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (len(voice), 2)).astype(np.float32)
    delayed = np.roll(voice, 20)
    for right in (voice, 0.3 * voice, np.zeros_like(voice), delayed, noise[:, 1]):
        data = encode(np.stack([voice, right], axis=1) + noise, "WAV", "PCM_16")
        stored, _ = soundfile.read(io.BytesIO(data), dtype="float32")
        samples, told = decode(data)
        np.testing.assert_array_equal(samples, stored.mean(axis=1, dtype=np.float32))
        assert told == []


@pytest.mark.parametrize(("fmt", "gain"), [("WAV", -1.0), ("FLAC", -0.8), ("WAV", -1.3)])
def test_opposite_phase_takes_the_louder_channel(voice, fmt: str, gain: float):
    stereo = 0.7 * np.stack([voice, gain * voice], axis=1)
    samples, (told,) = decode(encode(stereo, fmt, "PCM_16"))
    level = 0.7 * max(1, abs(gain))
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(
        level * np.sqrt(np.mean(voice**2)), rel=0.02
    )
    assert "opposite phase" in told


def test_phase_that_turns_in_the_middle(voice):
    sign = np.where(np.arange(len(voice)) < len(voice) // 2, 1, -1)
    samples, told = decode(encode(np.stack([voice, sign * voice], axis=1), "WAV", "PCM_16"))
    half = len(voice) // 2
    before = slice(half - RATE // 2)
    np.testing.assert_allclose(samples[before], voice[before], atol=1e-4)
    after = slice(half + RATE // 2, None)
    assert np.abs(samples[after] ** 2).sum() == pytest.approx((voice[after] ** 2).sum(), rel=0.01)
    assert len(told) == 1


LEAK = 0.1  # -20 dB


def clip(name: str) -> np.ndarray:
    samples, _ = decode((DATA / name).read_bytes())
    return (0.07 * samples / np.sqrt(np.mean(samples**2))).astype(np.float32)


@pytest.fixture(scope="module")
def turns() -> tuple[np.ndarray, np.ndarray]:
    """Two speakers who take turns, each alone."""
    first, second = clip("en_two.wav"), clip("es_two.flac")
    pause = np.zeros(RATE // 2, np.float32)
    a = np.concatenate([first, pause, 0 * second, pause, first])
    b = np.concatenate([0 * first, pause, second, pause, 0 * first])
    return a, b


def plain_wav(*channels: np.ndarray) -> bytes:
    return encode(np.stack(channels, axis=1), "WAV", "PCM_16")


def opus(*channels: np.ndarray) -> bytes:
    samples = np.repeat(np.stack(channels, axis=1), 3, axis=0)
    return tracks("webm", Sound(samples, 48_000, "stereo", "libopus"))


def left(samples: np.ndarray, where: np.ndarray) -> float:
    """The share of the sound at some places that is not silenced."""
    loud = np.convolve(np.abs(where), np.ones(800) / 800, "same") > 0.01
    n = min(len(samples), len(loud))
    still = np.convolve(np.abs(samples[:n]), np.ones(160), "same") > 0.01
    return float(still[loud[:n]].mean())


def noise(n: int, level: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, level, n).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "gain"),
    sample([(opus, 0.5), (plain_wav, 1.0), (plain_wav, -1.0), (plain_wav, 0.1)], 4),
)
def test_the_same_sound_in_both_channels_is_heard_once(turns, make, gain: float):
    both = turns[0] + turns[1]
    data = make(both, gain * both)
    first, told_first = decode(data, channel=0)
    second, (told_second,) = decode(data, channel=1)
    assert left(first, both) > 0.99
    assert told_first == []
    assert left(second, both) < 0.01
    assert told_second.startswith("channel 2 repeats channel 1 in ")


def test_the_louder_copy_is_kept(turns):
    both = turns[0] + turns[1]
    data = plain_wav(0.2 * both, both)
    assert left(decode(data, channel=0)[0], both) < 0.05
    assert left(decode(data, channel=1)[0], both) > 0.99


@pytest.mark.parametrize(("make", "delay"), sample([(opus, 48), (plain_wav, 0)], 2))  # samples
def test_a_speaker_who_is_heard_quietly_in_the_others_channel(turns, make, delay: int):
    a, b = turns
    data = make(
        a + LEAK * np.roll(b, delay) + noise(len(a), 0.0005, 1),
        b + LEAK * np.roll(a, delay) + noise(len(a), 0.0005, 2),
    )
    for channel, own, other in ((0, a, b), (1, b, a)):
        samples, (told,) = decode(data, channel=channel)
        assert left(samples, own) > 0.99
        assert left(samples, other) < 0.25
        assert "crosstalk" in told


def test_channels_of_their_own_are_left_bit_by_bit(turns):
    a, b = (voice + noise(len(voice), 0.0005, seed) for seed, voice in enumerate(turns))
    for channel in (0, 1):
        samples, told = decode(plain_wav(a, b), channel=channel)
        np.testing.assert_array_equal(samples, decode(plain_wav((a, b)[channel]))[0])
        assert told == []
