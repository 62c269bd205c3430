"""Peers on a CPU and a tiny shape: lengths are forced, and a bad peer costs only its own lines."""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest
import transformers

from eval.bench import peers
from eval.bench.peers import PEERS, measure_ctranslate2, measure_peer
from eval.bench.table import Measurement
from eval.random_whisper import PROMPT, prompt_ids, write_peer_checkpoint
from serve.contract.errors import EarshotError, UnavailableError


def silent(line):
    pass


@pytest.fixture
def short(monkeypatch):
    """Fewer tokens and requests, so that every workload ends soon."""
    monkeypatch.setattr(peers, "REQUESTS", 2)
    monkeypatch.setattr(peers, "REQUEST_TOKENS", 7)
    monkeypatch.setattr(peers, "THROUGHPUT_TOKENS", 12)


def kinds(rows):
    assert all(row.value > 0 for row in rows)
    return [(row.workload, row.system, row.unit) for row in rows]


def test_ctranslate2_decodes_forced_lengths(short, tiny):
    rows = list(measure_ctranslate2(tiny, "cpu", 0.0, silent, 2))
    assert kinds(rows) == [
        (workload, f"CTranslate2 {compute_type}", unit)
        for compute_type in ("float32", "int8")
        for workload, unit in (("latency", "ms"), ("throughput", "RTFx"))
    ]


def test_the_checkpoint_is_what_transformers_reads(tmp_path, tiny):
    write_peer_checkpoint(tmp_path, tiny)
    processor = transformers.WhisperProcessor.from_pretrained(tmp_path)
    tokens = list(PROMPT)
    facts = [50258, 50259, 50360, 50364]  # of every published large-v3
    assert processor.tokenizer.convert_tokens_to_ids(tokens) == facts
    assert prompt_ids(tiny) == facts
    sound = np.zeros(16_000, np.float32)
    features = processor(sound, sampling_rate=16_000, return_tensors="np").input_features
    assert features.shape == (1, tiny.n_mels, 3000)
    model, info = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.eos_token_id == processor.tokenizer.eos_token_id == 50257
    assert all(bool(weight.isfinite().all()) for weight in model.state_dict().values())


class FakeVllm(types.ModuleType):
    """Answers as vllm does: what our side hands over is what is tested."""

    __version__ = "0.0"

    def __init__(self):
        super().__init__("vllm")
        self.sounds, self.options = [], []
        self.SamplingParams = lambda **fields: types.SimpleNamespace(**fields)

    def LLM(self, model, **settings):
        transformers.WhisperProcessor.from_pretrained(model)
        assert settings["mm_processor_cache_gb"] == 0 and not settings["enable_prefix_caching"]
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        return self

    def generate(self, prompts, limits, use_tqdm, mm_processor_kwargs):
        assert use_tqdm is False
        self.options.append(mm_processor_kwargs)
        results = []
        for prompt, limit in zip(prompts, limits, strict=True):
            sound, rate = prompt["encoder_prompt"]["multi_modal_data"]["audio"]
            assert rate == 16_000 and sound.dtype == np.float32
            self.sounds.append(sound)
            assert prompt["decoder_prompt"]["prompt_token_ids"] == [50258, 50259, 50360, 50364]
            assert limit.ignore_eos and limit.temperature == 0
            tokens = types.SimpleNamespace(token_ids=[1] * limit.max_tokens)
            results.append(types.SimpleNamespace(outputs=[tokens]))
        return results


def test_vllm_gets_new_sound_and_a_length_for_every_window(short, monkeypatch, tiny):
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(peers, "_IN_FLIGHT", 3)
    for name in (*peers.ENVIRONMENT, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    rows = list(peers.measure_vllm(tiny, "cuda:1", 0.0, silent))
    assert kinds(rows) == [
        (workload, f"vLLM fp16, log-mel on {where}", unit)
        for where in ("CPU", "GPU")
        for workload, unit in (
            ("latency", "ms"),
            ("throughput", "RTFx"),
            ("MLPerf-shaped", "samples/s"),
        )
    ]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert {len(sound) for sound in fake.sounds} == {160_000, 480_000}
    mine = [(len(s), s[:1000].tobytes()) for s in fake.sounds[: len(fake.sounds) // 2]]
    assert len(set(mine)) == len(mine)
    assert fake.options[0] is None and fake.options[-1] == {"device": "cuda"}


def test_vllm_is_refused_without_a_gpu(tiny):
    with pytest.raises(UnavailableError, match="vLLM's wheel runs on GPUs only"):
        list(peers.measure_vllm(tiny, "cpu", 0.0, silent))


def test_a_length_that_was_not_kept_is_an_error():
    with pytest.raises(EarshotError, match=r"forced 2 windows to \[5\] tokens, got \[4, 5\] for 2"):
        peers.seconds_of(lambda lengths: [5, 4], [5, 5])


def test_windows_at_once_are_enough_for_the_time(monkeypatch):
    """A decoder of 100 windows a second on a clock of its own."""
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(peers, "time", clock)
    calls = []

    def decode(lengths):
        calls.append(len(lengths))
        clock.now += len(lengths) / 100
        return list(lengths)

    found = peers.offline(decode, itertools.count(1), 16, 2.0)
    assert calls == [16, 240] and found["seconds"] == pytest.approx(2.4)
    assert found["tokens_on_average"] == 120.5
    row = peers.throughput("peer", decode, 50, 2.0, "")
    assert row.value == pytest.approx(3000) and row.figures["seconds"] == pytest.approx(2.4)


def raises(shape, device, seconds, say):
    say(f"in process {os.getpid()}")
    yield Measurement("latency", "peer", seconds, "ms", None, device)
    raise EarshotError("no such length")


def dies(shape, device, seconds, say):
    yield Measurement("latency", "peer", seconds, "ms", None, device)
    print("the GPU is on fire", flush=True)
    os.abort()


def hangs(shape, device, seconds, say):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(f"{child.pid} below {tempfile.gettempdir()}")
    time.sleep(600)
    yield


@pytest.fixture
def measured(monkeypatch):
    """Measures a peer that is made up."""

    def measure(peer, say):
        monkeypatch.setitem(PEERS, "peer", (peer, ()))
        return list(measure_peer("peer", None, "cpu", 1.5, say))

    return measure


@pytest.mark.parametrize(
    ("run", "why"),
    [(raises, "no such length"), (dies, "the peer peer ended early: the GPU is on fire")],
)
@pytest.mark.nightly
def test_what_a_peer_measured_before_it_failed_is_kept(run, why, measured):
    said = []
    assert measured(run, said.append) == [
        Measurement("latency", "peer", 1.5, "ms", None, "cpu"),
        Measurement("throughput", "peer", None, "RTFx", None, f"refused: {why}"),
    ]
    if run is raises:
        assert said[0].startswith("in process") and said[0] != f"in process {os.getpid()}"
    else:
        assert said[-1] == "peer: the GPU is on fire"


@pytest.mark.nightly
def test_a_run_that_is_given_up_leaves_nothing(measured):
    found = []

    def interrupt(line):
        pid, _, folder = line.split()
        found.extend([psutil.Process(int(pid)), Path(folder)])
        assert found[1].is_dir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(hangs, interrupt)
    with contextlib.suppress(psutil.NoSuchProcess):
        found[0].wait(60)
    assert not found[0].is_running() and not found[1].exists()


def test_a_peer_that_falls_silent_is_given_up(monkeypatch, measured):
    monkeypatch.setattr(peers, "START_S", 0.0)
    monkeypatch.setattr(peers, "SUSTAINED", 0)
    (row,) = measured(hangs, silent)
    assert row.value is None and "said nothing for 0 s" in row.detail
