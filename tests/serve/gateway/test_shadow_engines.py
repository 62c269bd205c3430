"""A sound engine raises no alert of the shadow monitor; one with a wrong layer does, soon."""

import dataclasses
import random

import pytest

from build.clips import load_clips
from serve.contract.config import load_config
from serve.contract.messages import Request
from serve.gateway.shadow.figures import BOUND, DriftCusum, baseline_of, compare, scored
from serve.transcriber.open import open_transcriber
from tests.broken_engine import break_engine

pytestmark = pytest.mark.nightly
CLIPS = 40
LAYER = "decoder.layers.0"
SOON = 200  # requests


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """Answers of the reference, the sound engine and the broken one to the same clips."""
    config = load_config("configs/demo.toml")
    transcriber = dataclasses.replace(config.transcriber, beam_size=1, temperatures=(0.0,))
    config = dataclasses.replace(config, transcriber=transcriber)
    folder = tmp_path_factory.mktemp("engines")
    break_engine(config.engine, folder / "reference", LAYER, 1.002)
    break_engine(config.engine, folder / "broken", LAYER, 1.2)
    engines = [str(folder / "reference"), config.engine, str(folder / "broken")]
    clips = load_clips("tests/data/heldout/manifest.jsonl")[:CLIPS]
    answers = []
    for engine in engines:
        with open_transcriber(config, engine) as opened:
            transcripts = (opened.transcribe(Request(clip.path.read_bytes())) for clip in clips)
            answers.append([scored(transcript) for transcript in transcripts])
    return answers


def alert_after(pairs, baseline, seed):
    """The request that raises an alert, of 2,000 drawn ones; None: no request does."""
    drift = DriftCusum(baseline)
    for number, pair in enumerate(random.Random(seed).choices(pairs, k=2000), start=1):
        drift.add(pair.gaps)
        if drift.value > BOUND:
            return number
    return None


def test_a_sound_engine_raises_no_alert_and_a_broken_one_soon(heard):
    reference, sound, broken = heard
    of_sound = [compare(*pair) for pair in zip(sound, reference, strict=True)]
    of_broken = [compare(*pair) for pair in zip(broken, reference, strict=True)]
    baseline = baseline_of(of_sound[::2])
    assert [alert_after(of_sound[1::2], baseline, seed) for seed in range(5)] == [None] * 5
    assert all((alert_after(of_broken[1::2], baseline, seed) or 2000) < SOON for seed in range(5))
