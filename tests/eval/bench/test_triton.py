"""The bench through Triton: its engine folder, its clients, its checks, and all of it for real."""

import dataclasses
import io
import types

import pytest
import soundfile
import torch

from eval.bench import clients as bench_clients
from eval.bench import triton as bench_triton
from eval.bench.clients import Ask, Clients, ask, wav
from eval.bench.engine import SHAPES, RandomEngine, random_engine, write_engine
from serve.config import RuntimeConfig, load_config
from serve.engine import open_engine
from serve.errors import EarshotError, OverloadedError, UnavailableError
from serve.messages import Timings, Transcript
from serve.speech.tokenizer import Tokenizer
from serve.triton.server import free_ports

TINY = dataclasses.replace(
    SHAPES["whisper-large-v3-turbo"], n_audio_state=64, n_audio_head=1, n_audio_layer=1,
    n_audio_ffn=64, n_text_state=64, n_text_head=1, n_text_layer=1, n_text_ffn=64,
)  # fmt: skip


def config():
    turbo = load_config("configs/large-v3-turbo.toml")
    return dataclasses.replace(turbo, runtime=RuntimeConfig(slots=3, encoder_batch=2, threads=1))


@pytest.fixture(scope="module")
def made():
    found = random_engine(config())
    return RandomEngine(found.path, dataclasses.replace(found.manifest, dims=TINY))


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    write_engine(made, folder, "cpu")
    return folder


def test_the_made_up_engine_on_disk_is_the_one_in_memory(made, folder):
    """Opened strictly, with its hashes checked, like any other."""
    engine = open_engine(folder)
    assert engine.manifest.dims == TINY
    found, expected = engine.load_weights(), made.load_weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_id_of_the_made_up_vocabulary_has_a_text(folder):
    tokenizer = Tokenizer.open(open_engine(folder))
    assert tokenizer.decode([ord("!") - 33]) == "!"
    words = [tokenizer.decode([id]) for id in range(256, 50257)]
    assert len(set(words)) == len(words) and all(word[0] == " " and len(word) > 1 for word in words)
    assert tokenizer.special_name(50258) == "<|startoftranscript|>"
    assert tokenizer.prompt_ids("en", "transcribe", False, "")[1] == 50259


def test_a_file_of_noise_lasts_as_long_as_it_should():
    info = soundfile.info(io.BytesIO(wav(0.5, seed=1)))
    assert (info.frames, info.samplerate, info.subtype) == (8000, 16_000, "PCM_16")
    assert wav(0.5, seed=1) != wav(0.5, seed=2)


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
    what, good = Ask(1.0, 7), Says("words", 1.0)
    assert ask(good, b"", what).latency_s >= 0
    assert good.options == {"language": "en", "timestamps": False, "max_tokens": 7}
    for bad in (Says("", 1.0), Says("words", 0.9)):
        with pytest.raises(EarshotError, match=r"expected text for 1\.0 s"):
            ask(bad, b"", what)


def test_counters_that_do_not_fit_the_answers_are_refused():
    before = {"windows": 1.0, "retries": 0.0, "tokens": 224.0}
    after = {"windows": 11.0, "retries": 0.0, "tokens": 264.0}
    bench_triton._check(before, after, answers=10, tokens=4)
    for wrong in ({"tokens": 263.0}, {"windows": 12.0}, {"retries": 1.0}):
        with pytest.raises(EarshotError, match="10 answers cost the server"):
            bench_triton._check(before, {**after, **wrong}, answers=10, tokens=4)


def test_the_served_config_tries_once_and_has_room():
    served = bench_triton.served(config(), 300)
    assert served.transcriber.temperatures == (0.0,)
    assert served.transcriber.max_pending == 300
    assert served.server.grpc_port != config().server.grpc_port
    assert bench_triton.served(config(), 5).transcriber.max_pending == 256


def test_requests_are_shared_out_between_processes(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [bench_clients.processes_for(n) for n in (1, 5, 72)] == [1, 5, 6]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert bench_clients.processes_for(72) == 1


def test_clients_without_a_server_say_so():
    (port,) = free_ports("127.0.0.1", 1)
    with (
        pytest.raises(UnavailableError, match=f"127.0.0.1:{port}"),
        Clients(f"127.0.0.1:{port}", Ask(0.1, 3), 2) as clients,
    ):
        clients.answers()


@pytest.mark.server
def test_both_workloads_through_a_real_server(folder, monkeypatch):
    monkeypatch.setattr(bench_triton, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(bench_triton, "REQUEST_TOKENS", 3)
    monkeypatch.setattr(bench_triton, "REQUESTS", 4)
    monkeypatch.setattr(bench_triton, "WARM_REQUESTS", 1)
    said = []
    start, load, one = bench_triton.through_triton(config(), folder, 50.0, 1.0, said.append)
    assert [row.workload for row in (start, load, one)] == ["start", "throughput", "one request"]
    assert all(row.is_ours and row.value > 0 for row in (start, load, one))
    assert 0 < start.figures["model_s"] < start.value
    assert load.value == pytest.approx(30 * load.figures["windows_per_s"])
    assert load.figures["of_in_process"] == pytest.approx(load.value / 50)
    assert load.figures["seconds"] >= 1.0
    assert 0 < one.figures["p50_ms"] <= one.figures["p99_ms"]
    assert any("temperatures [0.0]" in line for line in said)


@pytest.mark.server
def test_a_refused_request_ends_the_load(folder, monkeypatch):
    """Not a slower figure: the server took fewer requests than were meant to be in flight."""
    few = bench_triton.served(config(), 5)
    few = dataclasses.replace(few, transcriber=dataclasses.replace(few.transcriber, max_pending=1))
    monkeypatch.setattr(bench_triton, "served", lambda config, inside: few)
    rows = bench_triton.through_triton(config(), folder, None, 1.0, lambda line: None)
    assert next(rows).workload == "start"
    with pytest.raises(OverloadedError, match="1 of 1 requests are pending"):
        next(rows)


def test_a_server_that_does_not_answer_is_named():
    gone = types.SimpleNamespace(metrics="127.0.0.1:9", failure=lambda: "its log ends here")
    with pytest.raises(UnavailableError, match="in trouble: its log ends here"):
        bench_triton._counters(gone)
