"""build.summary: what people are told about an engine."""

import dataclasses

import pytest

from build.summary import summary
from serve.contract.engine import Engine
from tests.checkpoints import write_engine


@pytest.fixture(scope="module")
def built(checkpoint, tmp_path_factory):
    return write_engine(checkpoint, tmp_path_factory.mktemp("summary") / "engine")


def lines_of(engine, **changes):
    """The summary's lines by name, of the engine with some facts in the manifest changed."""
    manifest = dataclasses.replace(engine.manifest, **changes)
    heading, *lines = summary(Engine(engine.path, manifest)).splitlines()
    assert heading == f"Engine {engine.path}"
    width = max(len(line[2:].split("  ")[0]) for line in lines)
    return [(line[2 : 2 + width].rstrip(), line[4 + width :]) for line in lines]


def test_fp16_and_english_only(built):
    english = dataclasses.replace(built.manifest.tokenizer, languages={})
    lines = dict(lines_of(built, precision="fp16", tokenizer=english, quantization={}))
    assert lines["runtime"] == "native, FP16 weights, format 2"
    assert lines["languages"] == "English only"
    assert "INT8 error" not in lines


def test_the_agreement_is_shown_beside_that_of_fp16(built):
    measured = {"greedy_agreement": 0.9, "fp16_greedy_agreement": 0.99, "tokens": 120}
    lines = dict(lines_of(built, verification=measured))
    told = "greedy agreement 90.00%, fp16 greedy agreement 99.00%, tokens 120"
    assert lines["verified"] == told
