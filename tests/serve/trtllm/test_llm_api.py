"""TensorRT-LLM's LLM API: what is asked of it, what is refused, and how failures end."""

import dataclasses
import json
import multiprocessing
import threading

import numpy as np
import pytest
import torch

from serve.contract.config import TranscriberConfig
from serve.contract.errors import (
    ConfigError,
    DeviceError,
    EarshotError,
    OptionError,
    UnavailableError,
)
from serve.contract.runtimes import TrtllmConfig
from serve.runtime.loader import open_runtime
from serve.transcriber.loop import Transcriber
from serve.trtllm import worker
from serve.trtllm.llm_api import LlmApiExecutor, start_settings
from tests.fake_trtllm.install import OnThread, install_api
from tests.runtimes import LLM_API, run, samples_job
from tests.waits import WAIT_S, wait_until


@pytest.fixture(scope="module")
def fake():
    """The stand-in's `tensorrt_llm.llmapi`, with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        yield install_api(patch)


@pytest.fixture
def job(engine):
    return samples_job(engine)


def settings(**changes):
    """Runtime settings; those of `TrtllmConfig` by their names too."""
    own = {f.name for f in dataclasses.fields(TrtllmConfig)} & changes.keys()
    trtllm = TrtllmConfig(**{name: changes.pop(name) for name in own})
    return dataclasses.replace(LLM_API.runtime, tensorrt_llm=trtllm, **changes)


@pytest.fixture
def opened(engine, fake):
    """Open the engine with changed settings; gives runtime and LLM."""
    runtimes = []

    def opened(**changes):
        runtimes.append(open_runtime(engine, settings(**changes)))
        return runtimes[-1], fake.LLM.instances[-1]

    yield opened
    for runtime in runtimes:
        runtime.close()


class TestRequests:
    def test_the_library_is_configured_for_whisper(self, opened, engine):
        _, llm = opened(kv_cache_fraction=0.6)
        assert llm.model == str(engine.path / "checkpoint")
        assert llm.dtype is torch.bfloat16
        args = llm.args
        assert (args.backend, args.attn_backend) == ("pytorch", "TRTLLM")
        assert (args.max_batch_size, args.max_beam_width) == (LLM_API.runtime.slots, 1)
        assert args.max_input_len >= 1500
        assert args.max_num_tokens == 1500 * (LLM_API.runtime.encoder_batch + 1)
        assert args.cuda_graph_config is None
        assert args.scheduler_config.use_python_scheduler
        cache = args.kv_cache_config
        assert cache.enable_block_reuse is False
        assert (cache.free_gpu_memory_fraction, cache.cross_kv_cache_fraction) == (0.6, 0.75)

    def test_graphs_cover_every_sequence(self, opened):
        _, llm = opened(cuda_graph=True, beam_width=2)
        assert llm.args.cuda_graph_config.max_batch_size == 2 * LLM_API.runtime.slots
        assert llm.args.cuda_graph_config.enable_padding

    def test_requests_carry_what_whisper_needs(self, opened, job):
        runtime, llm = opened()
        made = job(1, language="es", max_tokens=7)
        run(runtime, [made])
        ((inputs, params),) = llm.requests
        assert inputs["prompt"] == "<|startoftranscript|><|es|><|transcribe|><|notimestamps|>"
        ((samples, rate),) = inputs["multi_modal_data"]["audio"]
        assert rate == 16_000
        assert np.array_equal(samples, made.features.numpy())
        assert params.max_tokens == 7
        assert given(params).keys() == {"max_tokens", "temperature", "logprobs", "detokenize"}

    def test_windows_in_flight_stay_within_the_slots(self, opened, job, monkeypatch):
        (runtime, llm), slots = opened(), LLM_API.runtime.slots
        encode = llm.encode

        def encode_when_all_wait(active):
            wait_until(lambda: len(llm.requests) >= slots, "too few windows in flight")
            encode(active)

        monkeypatch.setattr(llm, "encode", encode_when_all_wait)
        run(runtime, [job(id, max_tokens=4) for id in range(9)])
        assert llm.most_active == slots
        assert max(llm.encoded_together) <= LLM_API.runtime.encoder_batch + 1

    def test_beams_neither_stream_nor_sample(self, opened, engine, job):
        runtime, llm = opened(beam_width=2)
        able = runtime.capabilities
        assert (able.beam_width, able.streaming) == (2, False)
        (ended,) = run(runtime, [job(1, beam_size=2)]).values()
        assert ended.last.scores.avg_logprob is None
        ((_, params),) = llm.requests
        assert (params.use_beam_search, params.best_of, params.n) == (True, 2, 1)
        assert params.length_penalty == 1.0, "the library's own default is none"
        assert llm.args.max_beam_width == 2
        with pytest.raises(OptionError, match=r"^beam_size = 1, which .*; expected 2$"):
            runtime.submit(job(2))
        with pytest.raises(ConfigError, match=r"transcriber\.beam_size = 1, which .*; expected 2"):
            Transcriber(engine, runtime, TranscriberConfig(temperatures=(0.0,)))

    def test_cancelled_jobs_are_aborted_in_the_library(self, opened, job):
        runtime, llm = opened()
        for id in range(5):
            runtime.submit(job(id, max_tokens=400))
        wait_until(lambda: len(llm.requests) == 5, "requests do not reach the library")
        for id in range(5):
            runtime.cancel(id)
        assert {e.job_id for e in runtime.poll(0.0) if e.finished == "cancelled"} == set(range(5))
        wait_until(
            lambda: not (llm.queue or llm.active), "the library goes on with aborted requests"
        )


def test_a_cpu_is_refused(engine, fake):
    with pytest.raises(ConfigError, match=r"device = 'cpu', but .* needs an NVIDIA GPU"):
        open_runtime(engine, settings(device="cpu"))


def given(params):
    """The fields of `SamplingParams` that differ from its defaults."""
    defaults = type(params)()
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


class TestFailures:
    @pytest.mark.parametrize("kind", ["RequestError", "ValueError"])
    def test_a_refused_window_ends_alone(self, opened, fake, job, monkeypatch, kind):
        runtime, llm = opened()
        honest = llm.generate_async
        error = {"RequestError": fake.RequestError, "ValueError": ValueError}[kind]

        def picky(inputs, **options):
            if "<|es|>" in inputs["prompt"]:
                raise error("no Spanish today")
            return honest(inputs, **options)

        monkeypatch.setattr(llm, "generate_async", picky)
        ended = run(runtime, [job(1), job(2, language="es"), job(3)])
        assert [ended[id].last.finished == "error" for id in (1, 2, 3)] == [False, True, False]
        assert isinstance(ended[2].last.error, EarshotError)
        assert "TensorRT-LLM failed this window: no Spanish today" in str(ended[2].last.error)

    def test_an_end_without_a_known_reason_is_an_error(self, fake):
        output = fake.CompletionOutput(0, token_ids=[5, 6], finish_reason="timeout")
        answer = worker.last_message(output, sent=1)
        assert (answer["finished"], answer["tokens"]) == ("error", (6,))
        assert "unexpected end 'timeout'" in answer["error"]

    def test_a_dead_library_is_a_device_error(self, opened, job):
        runtime, llm = opened()
        llm.broken = "CUDA error: an illegal memory access was encountered"
        runtime.submit(job(1))
        with pytest.raises(DeviceError, match="illegal memory access"):
            for _ in range(1000):
                runtime.poll(0.05)
        with pytest.raises(DeviceError, match="illegal memory access"):
            runtime.submit(job(2))

    def test_what_the_library_says_on_starting_reaches_the_user(self, engine, fake, monkeypatch):
        def start(self, **options):
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(fake.LLM, "__init__", start)
        with pytest.raises(UnavailableError, match=r"cannot run the checkpoint in .*out of memory"):
            open_runtime(engine, settings())

    def test_polls_wait_no_longer_than_asked(self, opened, job, monkeypatch):
        runtime, llm = opened()
        monkeypatch.setattr(llm, "step", lambda *_: None)  # never says anything
        runtime.submit(job(1))
        assert runtime.poll(0.2) == []
        runtime.cancel(1)
        (event,) = runtime.poll(0.0)
        assert event.finished == "cancelled"

    def test_a_library_that_does_not_stop_is_killed(self, engine, fake, monkeypatch, caplog):
        executor = LlmApiExecutor(engine, settings(), stop_s=0.1)
        llm = fake.LLM.instances[-1]
        wake, honest = threading.Event(), llm.shutdown
        monkeypatch.setattr(llm, "shutdown", lambda: wake.wait(WAIT_S) and honest())
        executor.close()
        assert "did not shut down within 0.1 s; killing it" in caplog.text
        wake.set()
        llm.thread.join(WAIT_S)
        assert not llm.thread.is_alive()

    def test_messages_in_flight_do_not_delay_the_end(self, engine, fake, monkeypatch, caplog):
        serve = worker._Session.serve

        async def serve_and_send(session, version):
            await serve(session, version)
            for _ in range(10_000):  # more than the connection's buffer holds
                session._send(id=0, tokens=[1])

        monkeypatch.setattr(worker._Session, "serve", serve_and_send)
        LlmApiExecutor(engine, settings(), stop_s=WAIT_S).close()
        assert "did not shut down" not in caplog.text

    def test_a_server_that_goes_while_the_library_loads_leaves_nothing(self, engine, fake):
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            process = OnThread(None, theirs)
            ours.send_bytes(json.dumps(start_settings(engine, settings())).encode())
        assert process.wait(WAIT_S) == 0
        assert not fake.LLM.instances[-1].thread.is_alive()

    def test_closing_ends_the_thread(self, opened, job):
        runtime, llm = opened()
        runtime.submit(job(1, max_tokens=400))
        runtime.poll(0.05)
        runtime.close()
        assert not llm.thread.is_alive()
        assert "earshot-llm-api" not in {thread.name for thread in threading.enumerate()}
