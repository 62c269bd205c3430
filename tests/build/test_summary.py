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


@pytest.mark.parametrize(
    ("precision", "ours", "verdict"),
    [
        ("fp16", 1.0, "good: 100%"),
        ("int8", 0.97, "good: 97%"),
        ("int8", 0.86, "usual for INT8: 86%"),
        ("int8", 0.6, "less than usual for INT8: 60%"),
    ],
)
def test_the_agreement_is_judged_beside_that_of_fp16(built, precision, ours, verdict):
    measured = {"greedy_agreement": ours, "fp16_greedy_agreement": 0.99}
    lines = lines_of(built, precision=precision, verification=measured, quantization={})
    at = [name for name, _ in lines].index("verified")
    assert lines[at] == ("verified", f"greedy agreement {ours:.2%}")
    assert lines[at + 1][1].startswith(f"{verdict} of the decoded text")
    assert ("99% in FP16" in lines[at + 1][1]) == (precision == "int8")
