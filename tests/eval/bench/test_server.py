"""The bench through Triton: its clients, its checks, and all of it for real."""

import contextlib
import dataclasses
from unittest.mock import Mock

import pytest

from eval.bench import BenchPlan, server, table
from eval.bench.server import NoiseClip, measure_scaling, timed_request
from eval.bench.table import Measurement, scaling_check
from eval.config import changed
from serve.contract.errors import EarshotError
from serve.contract.messages import Timings, Transcript
from tests.eval.bench.conftest import quiet


@pytest.mark.nightly
@pytest.mark.server
def test_both_workloads_through_a_real_server(engine, cpu_config, monkeypatch):
    monkeypatch.setattr(server, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(server, "REQUEST_TOKENS", 3)
    monkeypatch.setattr(table, "WARM_REQUESTS", 1)
    config = changed(cpu_config, "runtime", slots=3)
    plan = BenchPlan(seconds=1.0, requests=4)
    start, load, one = server.through_server(config, engine.path, plan, quiet)
    assert [row.workload for row in (start, load, one)] == ["start", "throughput", "latency"]
    assert all(row.is_ours and row.value > 0 for row in (start, load, one))
    assert load.value == pytest.approx(30 * load.figures["requests_per_s"])
    assert {"gateway_cores", "tritonserver_cores", "whisper_cores"} <= load.figures.keys()
    assert load.figures["seconds"] >= 1.0
    assert one.figures["requests"] == 4
    assert 0 < one.figures["p50_ms"] <= one.figures["p99_ms"]


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("text", "duration_s", "tokens", "right"),
    [
        ("words", 1.0, 7, True),
        ("", 1.0, 7, False),
        ("words", 0.9, 7, False),
        ("words", 1.0, 6, False),
    ],
)
def test_an_answer_of_other_text_or_length_is_refused(text, duration_s, tokens, right):
    client, timings = Mock(), Timings(0.0, 0.0, 0.0, 0.0)
    answer = Transcript(text, "en", None, duration_s, (), timings, (1,) * tokens)
    client.transcribe.return_value = answer
    with contextlib.nullcontext() if right else pytest.raises(EarshotError, match="expected"):
        assert timed_request(client, b"", NoiseClip(1.0, 7)) >= 0
    options = {"language": "en", "timestamps": False, "max_tokens": 7}
    client.transcribe.assert_called_once_with(b"", **options)


# ---------------------------------------------------------------- several devices


@pytest.mark.parametrize(("rtfx", "passed"), [(9800, True), (9740, False)])
def test_each_engine_must_add_enough(rtfx, passed):
    rows = [
        Measurement("throughput", "cuda", value, "RTFx", figures={"engines": engines})
        for engines, value in ((1, 5000), (2, rtfx))
    ]
    check = scaling_check(rows)
    assert check.passed is passed
    assert check.detail.startswith(f"{rtfx / 5000:.3f} x the throughput with 2 x the engines, ")


@pytest.mark.nightly
@pytest.mark.server
def test_two_engines_get_the_load_and_every_window_is_counted(cpu_config, engine, monkeypatch):
    monkeypatch.setattr(server, "LENGTHS_S", range(1, 3))
    both = dataclasses.replace(cpu_config.runtime, device="cpu,cpu", slots=1)
    lines = []
    (found,) = measure_scaling(cpu_config, engine.path, [both], 1.0, lines.append)
    assert found.system == "earshot, through Triton, cpu,cpu" and found.value > 0
    assert found.figures["engines"] == 2 and found.figures["whisper_cores"] > 0
    assert "8 requests in flight" in lines[0]
