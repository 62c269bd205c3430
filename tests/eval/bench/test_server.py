"""The bench through Triton: its engine folder, its clients, its checks, and all of it for real."""

import dataclasses
import io
import types

import pytest
import soundfile
import torch

from eval.bench import server
from eval.bench.plan import Plan
from eval.bench.server import (
    LENGTHS,
    Answer,
    Figure,
    RequestSpec,
    clients_of,
    measure_scaling,
    noise,
    scaling_of,
    scaling_specs,
    timed_request,
)
from eval.random_whisper.engine import write_engine
from serve.contract.engine import open_engine
from serve.contract.errors import EarshotError, OverloadedError, UnavailableError
from serve.contract.messages import Timings, Transcript
from serve.speech.tokenizer import Tokenizer
from serve.supervisor.run import free_ports


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
    before = dict(zip(server.COUNTED, (1.0, 0.0, 224.0), strict=True))
    answers = [Answer(0.0, 0.1, RequestSpec(10.0, 4))] * 10

    def check(*after):
        counters = dict(zip(server.COUNTED, after, strict=True))
        fake = types.SimpleNamespace(settled=lambda *names: counters)
        server.check_counters(fake, before, answers)

    check(11.0, 0.0, 264.0)
    for wrong in ((11.0, 0.0, 263.0), (12.0, 0.0, 264.0), (11.0, 1.0, 264.0)):
        with pytest.raises(EarshotError, match="10 answers cost the server"):
            check(*wrong)


def test_the_served_config_tries_once_and_has_room(cpu_config):
    served = server.served(cpu_config, 300)
    assert served.transcriber.temperatures == (0.0,)
    assert served.transcriber.max_pending == 300
    assert server.served(cpu_config, 5).transcriber.max_pending == 256


@pytest.mark.nightly
@pytest.mark.server
def test_both_workloads_through_a_real_server(folder, served_config, monkeypatch):
    monkeypatch.setattr(server, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(server, "REQUEST_TOKENS", 3)
    monkeypatch.setattr(server, "WARM_REQUESTS", 1)
    said = []
    start, load, one = server.through_server(
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
@pytest.mark.nightly
def test_a_refused_request_ends_the_load(folder, served_config, monkeypatch):
    """Not a slower figure: the server took fewer requests than were meant to be in flight."""
    few = server.served(served_config, 5)
    few = dataclasses.replace(few, transcriber=dataclasses.replace(few.transcriber, max_pending=1))
    monkeypatch.setattr(server, "served", lambda config, inside: few)
    rows = server.through_server(served_config, folder, None, Plan(seconds=1.0), lambda line: None)
    assert next(rows).workload == "start"
    with pytest.raises(OverloadedError, match="1 requests are pending, the maximum"):
        next(rows)


# ---------------------------------------------------------------- requests


def test_a_file_of_noise_lasts_as_long_as_it_should():
    info = soundfile.info(io.BytesIO(noise(0.5, seed=1)))
    assert (info.frames, info.samplerate, info.subtype) == (8000, 16_000, "PCM_16")
    assert noise(0.5, seed=1) != noise(0.5, seed=2)


class Says:
    """A client whose answers are given."""

    def __init__(self, text, duration):
        timings = Timings(0.0, 0.0, 0.0, 0.0)
        self.transcript = Transcript(text, "en", None, duration, (), timings)
        self.options = None

    def transcribe(self, audio, **options):
        self.options = options
        return self.transcript


def test_an_answer_without_text_or_of_another_length_is_refused():
    spec, good = RequestSpec(1.0, 7), Says("words", 1.0)
    assert timed_request(good, b"", spec).latency_s >= 0
    assert good.options == {"language": "en", "timestamps": False, "max_tokens": 7}
    for bad in (Says("", 1.0), Says("words", 0.9)):
        with pytest.raises(EarshotError, match=r"expected text for 1\.0 s"):
            timed_request(bad, b"", spec)


@pytest.mark.nightly
def test_clients_without_a_server_say_so():
    (port,) = free_ports("127.0.0.1", 1)
    with (
        pytest.raises(UnavailableError, match=f"127.0.0.1:{port}"),
        clients_of(f"127.0.0.1:{port}", [RequestSpec(0.1, 3)], 2, 1) as clients,
    ):
        clients.answers()


# ---------------------------------------------------------------- several devices


def figure(engines, rtfx, gateway, engine):
    """Cores that are busy are one thread's each."""
    cores = {"gateway": gateway, "engine": engines * engine, "clients": 3.0}
    busiest = {"gateway": gateway, "engine": engine, "clients": 1.0}
    return Figure("cuda", engines, rtfx, rtfx / 20, 9.0, 100.0, 200.0, cores, {}, busiest)


def test_what_more_engines_would_meet():
    found = scaling_of([figure(1, 5000, 0.2, 0.7), figure(2, 9800, 0.5, 0.75)], cores=32)
    assert (found.ratio, found.efficiency) == (pytest.approx(1.96), pytest.approx(0.98))
    assert found.check.passed
    assert found.gateway_thread_binds_above == 4.0  # 0.25 of a core for each engine
    assert found.cores_bind_above == 32.0  # (0.5 + 1.5) / 2 for each; clients are elsewhere
    worse = scaling_of([figure(1, 5000, 0.2, 0.7), figure(2, 9740, 0.5, 0.75)], cores=32)
    assert not worse.check.passed


def test_lengths_lie_between_the_shortest_and_the_longest():
    specs = scaling_specs()
    assert (specs[0].seconds, specs[-1].seconds) == (10.0, 30.0)
    assert (specs[0].tokens, specs[-1].tokens) == (43, 128)
    assert len({spec.seconds for spec in specs}) == LENGTHS
    assert sum(spec.seconds for spec in specs) == 20.0 * LENGTHS


@pytest.mark.nightly
@pytest.mark.server
def test_two_engines_get_the_load_and_every_window_is_counted(
    cpu_config, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(server, "SHORTEST_S", 1.0)
    monkeypatch.setattr(server, "LONGEST_S", 2.0)
    write_engine(engine, tmp_path, "cpu")
    both = dataclasses.replace(cpu_config.runtime, device="cpu,cpu")
    plan, said = Plan(clients=2, seconds=1.0), []
    found = measure_scaling(cpu_config, tmp_path, [both], plan, said.append)
    (one,) = found.figures
    assert (one.device, one.engines) == ("cpu,cpu", 2) and one.rtfx > 0
    assert one.cores.keys() == one.busiest_thread.keys() == one.cpu_s_per_audio_hour.keys()
    assert {"clients", "gateway", "tritonserver", "engine"} <= one.cores.keys()
    assert one.cores["engine"] > one.busiest_thread["engine"] > 0
    assert found.ratio == 1.0 and found.efficiency == 1.0
    assert "4 requests in flight" in said[0]
