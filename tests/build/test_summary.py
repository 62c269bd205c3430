"""build.summary: what people are told about an engine."""

import dataclasses

import pytest

from build.summary import summary
from serve.contract.engine import Engine, FileFacts, LayerError
from tests.checkpoints import write_engine


@pytest.fixture(scope="module")
def built(checkpoint, tmp_path_factory):
    return write_engine(checkpoint, tmp_path_factory.mktemp("summary") / "engine")


def lines_of(engine, **changes):
    """The summary's lines by name, of the engine with some facts of its manifest changed."""
    manifest = dataclasses.replace(engine.manifest, **changes)
    heading, *lines = summary(Engine(engine.path, manifest)).splitlines()
    assert heading == f"Engine {engine.path}"
    width = max(len(line[2:].split("  ")[0]) for line in lines)
    return [(line[2 : 2 + width].rstrip(), line[4 + width :]) for line in lines]


def test_every_fact_has_its_line(built):
    source = dataclasses.replace(
        built.manifest.source, id="someone/whisper", sha256="0123456789abcdef" * 4
    )
    files = {"a": FileFacts("", 2_500_000), "b": FileFacts("", 500_000)}
    lines = dict(
        lines_of(
            built,
            source=source,
            files=files,
            checkpoint_bytes=4_000_000,
            versions={"earshot": "1", "torch": "2"},
            quantization={},
        )
    )
    assert lines == {
        "source": "someone/whisper (SHA-256 0123456789abcdef…)",
        "runtime": "native, INT8 weights per output channel, format 2",
        "network": "0.4 M parameters; 2 encoder and 1 decoder layers, width 64, 1 heads; "
        "80 mel bins; vocabulary 1,909",
        "languages": "100, with translation to English",
        "size": "4.0 MB checkpoint -> 3.0 MB engine (75%), tokenizer included",
        "built with": "earshot 1, torch 2",
        "verified": "not yet; `python -m build verify` does it",
    }


def test_parameters_are_those_of_the_checkpoint(built, checkpoint):
    count = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    assert dict(lines_of(built))["network"].startswith(f"{count / 1e6:.1f} M parameters")


@pytest.mark.parametrize("runtime", ["tensorrt_llm", "tensorrt_llm_api"])
def test_engines_that_only_their_library_reads_are_verified_elsewhere(built, runtime):
    lines = dict(lines_of(built, runtime=runtime, runtime_options={"max_batch_size": 4}))
    assert lines["verified"] == "not yet; `python -m eval trtllm-check` does it"
    assert lines["option max_batch_size"] == "4"


def test_a_deviation_is_given_as_shares_and_counts(built):
    measured = {
        "logits_relative": 0.01234,
        "logits_max_abs": 0.123456,
        "token_agreement": 1.0,
        "greedy_agreement": 0.5,
        "tokens": 87,
    }
    assert dict(lines_of(built, verification=measured))["verified"] == (
        "logits relative 1.23%, token agreement 100.00%, greedy agreement 50.00%, "
        "logits max abs 0.1235, tokens 87"
    )


@pytest.mark.parametrize(
    ("precision", "ours", "told"),
    [
        ("fp16", 1.0, ["good: 100% of what it decodes is what the checkpoint decodes"]),
        (
            "int8",
            0.97,
            ["good: 97% of what it decodes is what the checkpoint decodes, 99% in FP16"],
        ),
        (
            "int8",
            0.86,
            [
                "usual for INT8: 86% of what it decodes is what the checkpoint decodes, 99% in "
                "FP16; one token that differs changes those behind it,",
                "often to words as right: `python -m eval run` counts the errors of both",
            ],
        ),
    ],
)
def test_whether_the_agreement_is_good_is_said_beside_that_of_fp16(built, precision, ours, told):
    measured = {"greedy_agreement": ours, "fp16_greedy_agreement": 0.99}
    lines = lines_of(built, precision=precision, verification=measured, quantization={})
    at = [name for name, _ in lines].index("verified")
    assert lines[at] == ("verified", f"greedy agreement {ours:.2%}")
    assert [text for _, text in lines[at + 1 :]] == told


def test_the_matrices_that_int8_costs_most_come_first(built):
    errors = {f"m{i}": LayerError(relative=i / 1000, max_abs=i / 100) for i in range(1, 8)}
    lines = lines_of(built, quantization=errors)
    first = next(i for i, (name, _) in enumerate(lines) if name == "INT8 error")
    assert lines[first][1] == "0.400% relative on average of 7 matrices; worst:"
    assert lines[first + 1 :] == [("", f"0.{i}00%  max {i}.00e-02  m{i}") for i in (7, 6, 5, 4, 3)]


def test_fp16_and_english_only(built):
    english = dataclasses.replace(built.manifest.tokenizer, languages={})
    lines = dict(lines_of(built, precision="fp16", tokenizer=english, quantization={}))
    assert lines["runtime"] == "native, FP16 weights, format 2"
    assert lines["languages"] == "English only"
    assert "INT8 error" not in lines
