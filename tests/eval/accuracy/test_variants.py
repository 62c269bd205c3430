"""The command over a tiny engine with random weights: what it says is nonsense."""

import dataclasses

import pytest

from build.config import BuildConfig
from eval.accuracy import variants
from eval.accuracy.data import read_calls
from eval.accuracy.variants import VARIANTS, measure_variants
from eval.config import Config, EvalConfig
from serve.contract.errors import ConfigError


@pytest.fixture
def config(nano_config):
    evaluation = EvalConfig(limit=3, concurrency=2)
    return Config(**vars(nano_config()), build=BuildConfig(precision="int8"), eval=evaluation)


def test_variants_are_held_together_over_the_same_clips(config, tmp_path, run_of):
    told = []
    names = ("int8", "int8-words", "int8-greedy")
    result = measure_variants(run_of(config, said=told), variants=names)
    rows = result.sections[0].parts[0].rows
    assert [row[0] for row in rows] == ["int8", "int8-words", "int8-greedy"]
    assert [row[4] for row in rows] == ["fp16", "int8", "fp16-greedy"]
    # Words change no text; what did not run is said.
    assert rows[1][5:7] == ["+0.00 [+0.00, +0.00]", "3 of 3"]
    assert rows[0][5] == rows[2][5] == "did not run"
    assert len(told) == 4 and "3 of them drawn with seed 0" in told[0]
    assert len(read_calls(tmp_path / "int8-words.jsonl")) == 3
    assert result.figures["int8"].overall.clips == 3


def test_each_variant_changes_what_its_name_says(config):
    for name, variant in VARIANTS.items():
        found = variants._configured(config, variant)
        parts = name.split("-")
        assert variant.precision == parts[0] and variant.beside in VARIANTS
        assert (found.runtime.cross_kv == "int8") == ("kv8" in parts)
        assert (found.runtime.encoder_precision == "fp8") == ("fp8" in parts)
        assert variant.greedy == ("greedy" in parts) and bool(variant.options) == ("words" in parts)
        same = dataclasses.replace(found.runtime, cross_kv="full", encoder_precision="full")
        assert same == config.runtime


def test_an_unknown_variant_is_refused_before_anything_runs(config, tmp_path, run_of):
    with pytest.raises(ConfigError, match=r"unknown variant 'int4'; known: fp16, int8, "):
        measure_variants(run_of(config), variants=("int8", "int4"))
    assert not list(tmp_path.iterdir())
