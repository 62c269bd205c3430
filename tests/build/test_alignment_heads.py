"""Alignment heads that nobody names are measured; those of the demo checkpoint are among them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from build.alignment_heads import decode_recordings, measure_heads
from build.builders import up_to_date
from build.checkpoint import open_checkpoint
from build.config import BuildProduct
from build.recordings import VerificationAudio, read_recordings
from tests.checkpoints import write_engine

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.nightly
def test_the_heads_that_follow_speech_are_found(tmp_path):
    checkpoint = open_checkpoint("tests/fixture/checkpoint")
    engine = write_engine(checkpoint, tmp_path / "engine")
    named = checkpoint.facts.alignment_heads
    heard = decode_recordings(
        engine, read_recordings([str(DATA / "en_two.wav"), str(DATA / "en_three.mp3")])
    )
    assert all(len(one.tokens) > 20 for one in heard)
    found = measure_heads(engine, heard)
    assert set(named) <= set(found) and len(found) <= len(named) + 2

    silent = decode_recordings(engine, [VerificationAudio("silence", np.zeros(16_000, np.float32))])
    assert measure_heads(engine, silent) == ()


def test_an_engine_with_measured_heads_is_what_its_checkpoint_makes(tmp_path):
    checkpoint = open_checkpoint("tests/fixture/checkpoint")
    write_engine(checkpoint, tmp_path / "engine")
    facts = dataclasses.replace(checkpoint.facts, alignment_heads=())
    for one in (checkpoint, dataclasses.replace(checkpoint, facts=facts)):
        assert up_to_date(one, BuildProduct(engine=str(tmp_path / "engine")), verified=False)
