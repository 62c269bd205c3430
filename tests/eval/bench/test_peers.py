"""Peers on a CPU and a tiny shape: lengths are forced, and a bad peer costs only its own lines."""

import itertools
import os
import sys
import types

import numpy as np
import pytest
import transformers

from eval.bench import peers
from eval.bench.peers import PEERS, measure_ctranslate2, measure_peer
from eval.bench.table import Measurement
from serve.contract.errors import EarshotError
from tests.eval.bench.conftest import TINY, quiet


@pytest.fixture
def short(monkeypatch):
    """Fewer tokens and requests, so that every workload ends soon."""
    monkeypatch.setattr(peers, "REQUESTS", 2)
    monkeypatch.setattr(peers, "REQUEST_TOKENS", 7)
    monkeypatch.setattr(peers, "THROUGHPUT_TOKENS", 12)


def kinds(rows):
    assert all(row.value > 0 for row in rows)
    return [(row.system, row.workload) for row in rows]


def test_ctranslate2_decodes_forced_lengths(short, monkeypatch):
    monkeypatch.setattr(peers, "_BATCH", 2)
    rows = list(measure_ctranslate2(TINY, "cpu", 0.0, quiet))
    systems = "CTranslate2 float32", "CTranslate2 int8"
    assert kinds(rows) == list(itertools.product(systems, ("latency", "throughput")))


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


def test_vllm_gets_new_sound_and_a_length_for_every_window(short, monkeypatch):
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(peers, "_IN_FLIGHT", 3)
    for name in (*peers.ENVIRONMENT, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    rows = list(peers.measure_vllm(TINY, "cuda:1", 0.0, quiet))
    systems = "vLLM fp16, log-mel on CPU", "vLLM fp16, log-mel on GPU"
    workloads = "latency", "throughput", "MLPerf-shaped"
    assert kinds(rows) == list(itertools.product(systems, workloads))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert {len(sound) for sound in fake.sounds} == {160_000, 480_000}
    sounds = [(len(s), s[:1000].tobytes()) for s in fake.sounds[: len(fake.sounds) // 2]]
    assert len(set(sounds)) == len(sounds)
    assert fake.options[0] is None and fake.options[-1] == {"device": "cuda"}


def test_a_length_that_was_not_kept_is_an_error():
    with pytest.raises(EarshotError, match=r"forced 2 windows to \[5\] tokens, got \[4, 5\] for 2"):
        peers.seconds_of(lambda lengths: [5, 4], [5, 5])


def raises(shape, device, seconds, say):
    say(f"in process {os.getpid()}")
    yield Measurement("latency", "peer", seconds, "ms", None, device)
    raise EarshotError("no such length")


@pytest.mark.nightly
def test_what_a_peer_measured_before_it_failed_is_kept(monkeypatch):
    monkeypatch.setitem(PEERS, "peer", (raises, ()))
    lines = []
    assert list(measure_peer("peer", None, "cpu", 1.5, lines.append)) == [
        Measurement("latency", "peer", 1.5, "ms", None, "cpu"),
        Measurement("throughput", "peer", None, "RTFx", None, "refused: no such length"),
    ]
    assert lines[0].startswith("in process") and lines[0] != f"in process {os.getpid()}"
