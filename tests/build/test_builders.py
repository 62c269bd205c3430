"""build.builders: when an engine is up to date; alignment heads that a checkpoint leaves out."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from build.alignment_heads import measure_heads
from build.builders import up_to_date
from build.checkpoint import open_checkpoint
from build.config import BuildConfig, BuildProduct
from build.recordings import VerificationAudio, read_recording
from build.writer import write_manifest
from serve.contract.engine import MEL_FILTERS_FILE, open_engine
from serve.contract.manifest import WEIGHTS_FILE
from tests.checkpoints import write_engine

DATA = Path(__file__).parents[1] / "data"


def test_an_engine_is_up_to_date_until_something_changes(checkpoint, target):
    def current(changed=checkpoint, verified=False, **build):
        config = BuildProduct(engine=str(target), build=BuildConfig(**build))
        return up_to_date(changed, config, verified)

    assert not current()
    engine = write_engine(checkpoint, target)
    assert current()
    assert not current(verified=True)
    write_manifest(target, dataclasses.replace(engine.manifest, verification={"tokens": 1}))
    assert current(verified=True)
    assert not current(precision="fp16")
    assert not current(runtime="tensorrt_llm", precision="int8")
    source = dataclasses.replace(checkpoint.source, sha256="0" * 64)
    assert not current(dataclasses.replace(checkpoint, source=source))
    facts = dataclasses.replace(checkpoint.facts, suppress_tokens=())
    assert not current(dataclasses.replace(checkpoint, facts=facts))
    dims = dataclasses.replace(checkpoint.dims, n_text_layer=2)
    assert not current(dataclasses.replace(checkpoint, dims=dims))
    assert not current(dataclasses.replace(checkpoint, tokenizer_json=b"{}"))
    with (target / WEIGHTS_FILE).open("ab") as file:
        file.write(b"!")
    assert not current()
    manifest = write_engine(checkpoint, target).manifest
    assert current()
    del manifest.files[MEL_FILTERS_FILE]  # as in engines of earlier builds
    write_manifest(target, manifest)
    (target / MEL_FILTERS_FILE).unlink()
    assert open_engine(target) and not current()


@pytest.mark.nightly
def test_the_heads_that_follow_speech_are_found(tmp_path):
    checkpoint = open_checkpoint("tests/fixture/checkpoint")
    engine = write_engine(checkpoint, tmp_path / "engine")
    named = checkpoint.facts.alignment_heads
    speech = [read_recording(DATA / name) for name in ("en_two.wav", "en_three.mp3")]
    found = measure_heads(engine, speech)
    assert set(named) <= set(found) and len(found) <= len(named) + 2
    silence = VerificationAudio("silence", np.zeros(16_000, np.float32))
    assert measure_heads(engine, [silence]) == ()


def test_an_engine_with_measured_heads_is_what_its_checkpoint_makes(tmp_path):
    checkpoint = open_checkpoint("tests/fixture/checkpoint")
    write_engine(checkpoint, tmp_path / "engine")
    facts = dataclasses.replace(checkpoint.facts, alignment_heads=())
    for one in (checkpoint, dataclasses.replace(checkpoint, facts=facts)):
        assert up_to_date(one, BuildProduct(engine=str(tmp_path / "engine")), verified=False)
