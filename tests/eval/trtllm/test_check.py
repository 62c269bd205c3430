"""`python -m eval trtllm-check` on the stand-in: it passes, and it notices what is wrong."""

import dataclasses
import functools
from unittest.mock import Mock

import pytest
import torch

from eval.__main__ import main
from eval.trtllm import check
from serve.contract.engine import open_engine
from serve.contract.errors import UnavailableError
from tests.fake_trtllm.install import install, install_api


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The stand-in's executor module, with everything installed."""
    with pytest.MonkeyPatch.context() as patch:
        small = {"width": 128, "encoder_layers": 1, "decoder_layers": 2}
        patch.setattr(check, "_SPREAD", 2.0 * small["width"] ** -0.5)
        patch.setattr(check, "TINY", dataclasses.replace(check.TINY, **small))
        patch.setattr(check, "WINDOWS", 2)
        patch.setattr(check, "MAX_TOKENS", 6)
        yield install(patch, tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def built(fake, tmp_path_factory):
    """An FP16 engine of the random checkpoint, its configuration, and transformers' network."""
    work = tmp_path_factory.mktemp("check")
    network = check.make_checkpoint(work / "checkpoint")
    config = check.config_of(work, "fp16", "tensorrt_llm")
    return check.engine_of(config), config.runtime, network


def silent():
    return check.Checks(lambda line: None)


def whole_check(work, *precisions):
    """Run it to its end, and give what it says of each check."""
    checks = silent()
    check.run_checks(work, checks)
    steps = ("build", "load", "greedy tokens", "windows together")
    expected = [f"{precision}: {step}" for precision in precisions for step in steps]
    said = {one.name: one.detail for one in checks.ended if one.passed}
    assert list(said) == ["library and GPU", "random checkpoint", *expected]
    return said


@pytest.mark.nightly
def test_the_whole_check_passes_on_the_stand_in(fake, tmp_path):
    said = whole_check(tmp_path, "fp16", "int8")["library and GPU"]
    assert said == "TensorRT-LLM 1.2.1 on Stand-in GPU, compute capability 9.0"


def test_the_whole_check_passes_on_the_stand_in_of_the_llm_api(fake, tmp_path, monkeypatch):
    install_api(monkeypatch)
    said = whole_check(tmp_path, "fp16")
    library = "TensorRT-LLM 1.4.0 on Stand-in GPU, compute capability 9.0"
    assert said["library and GPU"] == library
    assert said["fp16: load"] == "TensorRT-LLM 1.4.0, in a separate process"
    engine = open_engine(tmp_path / "fp16")
    config = check.config_of(tmp_path, "fp16", "tensorrt_llm_api", "/there/python").runtime
    assert config.tensorrt_llm.python == "/there/python"
    other = check.make_checkpoint(tmp_path / "other")
    other.model.decoder.layers[1].fc2.weight.data.neg_()
    with pytest.raises(check.DifferenceError, match=r"window \d: token \d+ is"):
        check.check_engine(engine, config, other, silent())


def test_wrong_tokens_are_shown_at_the_first_difference(built):
    engine, _, network = built
    facts = engine.manifest.tokenizer
    job = check.make_jobs(engine)[0]
    reference = check.Reference(network)
    expected = reference.greedy(facts, job)
    assert check.compare_tokens(reference, [job], [expected], [expected], tie=0.05) == 0
    wrong = [*expected[:2], (expected[2] + 1) % facts.eot, *expected[3:]]
    with pytest.raises(check.DifferenceError, match=rf"token 2 is \[{wrong[2]}\], expected"):
        check.compare_tokens(reference, [job], [wrong], [expected], tie=0.0)
    with pytest.raises(check.DifferenceError, match="token 5 is missing"):
        check.compare_tokens(reference, [job], [expected[:5]], [expected], tie=0.05)
    assert check.compare_tokens(reference, [job], [wrong], [expected], tie=torch.inf) == 1


def leak(self, active, honest):
    """As a packed encoder would if its windows saw each other."""
    logits = honest(self, active)
    return logits.roll(1, dims=-1) if len(self.active) > 1 else logits


def refuse(self, *arguments, honest):
    raise TypeError("__init__(): incompatible function arguments.\n1. long list")


@pytest.mark.parametrize(
    ("method", "broken", "wait_s", "message"),
    [
        ("logits_of", leak, 60.0, "window 0: token 0 is"),
        ("step", lambda self, honest: None, 0.05, "no end of windows"),
        ("__init__", refuse, 60.0, r"^fp16: load: TypeError: __init__"),
    ],
)
def test_a_broken_executor_is_noticed(built, fake, monkeypatch, method, broken, wait_s, message):
    engine, config, network = built
    honest = getattr(fake.Executor, method)
    monkeypatch.setattr(fake.Executor, method, functools.partialmethod(broken, honest=honest))
    monkeypatch.setattr(check, "WAIT_S", wait_s)
    checks = silent()
    with pytest.raises(check.DifferenceError, match=message):
        check.check_engine(engine, config, network, checks)
    assert checks.ended[-1].passed is False


def test_the_first_failure_ends_the_report(monkeypatch, capsys):
    missing = UnavailableError("TensorRT-LLM is not installed")
    monkeypatch.setattr(check, "_find", Mock(side_effect=missing))
    assert main(["trtllm-check"]) == 1
    out = capsys.readouterr().out
    assert "- **FAILED**: library and GPU. TensorRT-LLM is not installed" in out
    assert "random checkpoint" not in out and "- transformers: " in out
