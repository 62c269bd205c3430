"""The bench through Triton: its engine folder, its clients, its checks, and all of it for real."""

import dataclasses
import types

import pytest
import torch

from eval.bench import triton
from eval.bench.clients import Answer, RequestSpec
from eval.bench.plan import Plan
from eval.random_whisper.engine import write_engine
from serve.contract.engine import open_engine
from serve.contract.errors import EarshotError, OverloadedError
from serve.speech.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def served_config(cpu_config):
    runtime = dataclasses.replace(cpu_config.runtime, slots=3)
    return dataclasses.replace(cpu_config, runtime=runtime)


@pytest.fixture(scope="module")
def folder(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    write_engine(engine, folder, "cpu")
    return folder


def test_the_made_up_engine_on_disk_is_the_one_in_memory(engine, tiny, folder):
    """Opened strictly, with its hashes checked, like any other."""
    opened = open_engine(folder)
    assert opened.manifest.dims == tiny.dims
    found, expected = opened.load_weights(), engine.load_weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_id_of_the_made_up_vocabulary_has_a_text(folder):
    tokenizer = Tokenizer.open(open_engine(folder))
    assert tokenizer.decode([ord("!") - 33]) == "!"
    words = [tokenizer.decode([id]) for id in range(256, 50257)]
    assert len(set(words)) == len(words) and all(word[0] == " " and len(word) > 1 for word in words)
    assert tokenizer.special_name(50258) == "<|startoftranscript|>"
    assert tokenizer.prompt_ids("en", "transcribe", False, "")[1] == 50259


def test_counters_that_do_not_fit_the_answers_are_refused():
    before = dict(zip(triton.COUNTED, (1.0, 0.0, 224.0), strict=True))
    answers = [Answer(0.0, 0.1, RequestSpec(10.0, 4))] * 10

    def check(*after):
        counters = dict(zip(triton.COUNTED, after, strict=True))
        server = types.SimpleNamespace(settled=lambda *names: counters)
        triton.check_counters(server, before, answers)

    check(11.0, 0.0, 264.0)
    for wrong in ((11.0, 0.0, 263.0), (12.0, 0.0, 264.0), (11.0, 1.0, 264.0)):
        with pytest.raises(EarshotError, match="10 answers cost the server"):
            check(*wrong)


def test_the_served_config_tries_once_and_has_room(cpu_config):
    served = triton.served(cpu_config, 300)
    assert served.transcriber.temperatures == (0.0,)
    assert served.transcriber.max_pending == 300
    assert triton.served(cpu_config, 5).transcriber.max_pending == 256


@pytest.mark.nightly
@pytest.mark.server
def test_both_workloads_through_a_real_server(folder, served_config, monkeypatch):
    monkeypatch.setattr(triton, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(triton, "REQUEST_TOKENS", 3)
    monkeypatch.setattr(triton, "WARM_REQUESTS", 1)
    said = []
    start, load, one = triton.through_triton(
        served_config, folder, 50.0, Plan(seconds=1.0, requests=4), said.append
    )
    assert [row.workload for row in (start, load, one)] == ["start", "throughput", "latency"]
    assert all(row.is_ours and row.value > 0 for row in (start, load, one))
    assert 0 < start.figures["model_s"] < start.value
    assert load.value == pytest.approx(30 * load.figures["windows_per_s"])
    assert load.figures["of_in_process"] == pytest.approx(load.value / 50)
    assert load.figures["seconds"] >= 1.0
    assert one.figures["requests"] == 4 and "p50 of 4," in one.detail
    assert 0 < one.figures["p50_ms"] <= one.figures["p99_ms"]
    assert any("temperatures [0.0]" in line for line in said)


@pytest.mark.server
def test_a_refused_request_ends_the_load(folder, served_config, monkeypatch):
    """Not a slower figure: the server took fewer requests than were meant to be in flight."""
    few = triton.served(served_config, 5)
    few = dataclasses.replace(few, transcriber=dataclasses.replace(few.transcriber, max_pending=1))
    monkeypatch.setattr(triton, "served", lambda config, inside: few)
    rows = triton.through_triton(served_config, folder, None, Plan(seconds=1.0), lambda line: None)
    assert next(rows).workload == "start"
    with pytest.raises(OverloadedError, match="1 of 1 requests are pending"):
        next(rows)
