"""Sound that is too low for speech is told apart from speech."""

import json
from pathlib import Path

import numpy as np
import pytest
import soxr

from serve.speech import audio
from serve.speech.cutting import Bandwidth
from serve.speech.meter import AudioLimits
from tests.serve.speech.sounds import RATE, encode, tone

DATA = Path(__file__).parents[2] / "data"
CLIPS = [json.loads(line) for line in (DATA / "manifest.jsonl").read_text("utf-8").splitlines()]


def heard(samples: np.ndarray) -> Bandwidth:
    bandwidth = Bandwidth()
    blocks = list(bandwidth.watch(np.array_split(samples, 7)))
    np.testing.assert_array_equal(np.concatenate(blocks), samples)
    return bandwidth


def decode(data: bytes) -> np.ndarray:
    return audio.whole(audio.decode(data, AudioLimits(200.0)))


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    return decode((DATA / "en_two.wav").read_bytes())


@pytest.mark.parametrize("clip", CLIPS[::4], ids=lambda clip: clip["file"])
def test_speech_is_wide(clip: dict):
    bandwidth = heard(decode((DATA / clip["file"]).read_bytes()))
    assert not bandwidth.narrow
    assert bandwidth.warning() == ""


@pytest.mark.parametrize(("rate", "highest_hz"), [(1_000, 500), (2_000, 1_000)])
def test_low_rates(voice, rate: int, highest_hz: int):
    low = soxr.resample(voice, RATE, rate)
    for samples in (decode(encode(low, "WAV", "PCM_16", rate)), soxr.resample(low, rate, RATE)):
        bandwidth = heard(samples)
        assert bandwidth.narrow
        assert f"no frequencies above {highest_hz} Hz" in bandwidth.warning()


def test_a_tone_is_narrow_until_something_else_is_heard(voice):
    assert heard(tone()).narrow
    assert not heard(np.concatenate([tone(), 0.1 * voice])).narrow


def test_hum_under_speech_does_not_hide_it(voice):
    time_s = np.arange(len(voice)) / RATE
    hum = 0.5 * np.sin(2 * np.pi * 50 * time_s) + 0.3
    assert not heard((hum + 0.02 * voice).astype(np.float32)).narrow


def test_silence_is_neither():
    assert not heard(np.zeros(RATE, np.float32)).narrow
