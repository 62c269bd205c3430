"""Channels that are speakers' own: what one repeats of another is not heard twice."""

from pathlib import Path

import numpy as np
import pytest

from tests.marks import sample
from tests.serve.speech.sounds import RATE, Sound, decode, encode, tracks

DATA = Path(__file__).parents[2] / "data"
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


def wav(*channels: np.ndarray) -> bytes:
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
    ("make", "gain"), sample([(opus, 0.5), (wav, 1.0), (wav, -1.0), (wav, 0.1)], 4)
)
def test_the_same_sound_in_both_channels_is_heard_once(turns, make, gain: float):
    both = turns[0] + turns[1]
    data = make(both, gain * both)
    first, told_first = decode(data, channel=0)
    second, told_second = decode(data, channel=1)
    assert left(first, both) > 0.99
    assert told_first == []
    assert left(second, both) < 0.01
    assert len(told_second) == 1
    assert told_second[0].startswith("channel 2 repeats channel 1 in ")


def test_the_louder_copy_is_kept(turns):
    both = turns[0] + turns[1]
    data = wav(0.2 * both, both)
    assert left(decode(data, channel=0)[0], both) < 0.05
    assert left(decode(data, channel=1)[0], both) > 0.99


@pytest.mark.parametrize(("make", "delay"), sample([(opus, 48), (wav, 0)], 2))  # samples
def test_a_speaker_who_is_heard_quietly_in_the_others_channel(turns, make, delay: int):
    a, b = turns
    data = make(
        a + LEAK * np.roll(b, delay) + noise(len(a), 0.0005, 1),
        b + LEAK * np.roll(a, delay) + noise(len(a), 0.0005, 2),
    )
    for channel, own, other in ((0, a, b), (1, b, a)):
        samples, told = decode(data, channel=channel)
        assert left(samples, own) > 0.99
        assert left(samples, other) < 0.25
        assert len(told) == 1
        assert "crosstalk" in told[0]


def test_channels_of_their_own_are_left_bit_by_bit(turns):
    a, b = (voice + noise(len(voice), 0.0005, seed) for seed, voice in enumerate(turns))
    for channel in (0, 1):
        samples, told = decode(wav(a, b), channel=channel)
        np.testing.assert_array_equal(samples, decode(wav((a, b)[channel]))[0])
        assert told == []
