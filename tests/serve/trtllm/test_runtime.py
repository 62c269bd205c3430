"""What the adapter asks of the executor, what it refuses, and how failures end."""

import dataclasses
import inspect
import math

import pytest
import torch

from eval.random_whisper import special_ids
from serve.contract.engine import DETECT_LANGUAGE, Engine
from serve.contract.errors import ConfigError, DeviceError, EarshotError, EngineError, OptionError
from serve.contract.errors import UnavailableError as Unavailable
from serve.runtime.loader import open_runtime
from serve.runtime.protocol import DecodingOptions, Job
from serve.trtllm.executor import RulesCallback
from serve.trtllm.limits import ENGINES_FOLDER
from serve.trtllm.runtime import ExecutorRequest
from tests.checkpoints import NANO
from tests.fake_trtllm.facts import POST_PROCESSOR
from tests.fake_trtllm.install import compile_engine, install, make_config
from tests.runtimes import run

IDS = special_ids(NANO)
SOT, NO_TIMESTAMPS = IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"]
TIMED = (SOT, IDS["<|en|>"], IDS["<|transcribe|>"])
PLAIN = (*TIMED, NO_TIMESTAMPS)
DETECT = (SOT, DETECT_LANGUAGE, IDS["<|transcribe|>"])


def make_job(id=1, prompt=TIMED, **options):
    features = torch.randn(80, 3000, generator=torch.Generator().manual_seed(id))
    options = {"max_tokens": 12, "timestamps": prompt[-1] != NO_TIMESTAMPS, **options}
    return Job(id, features, prompt, DecodingOptions(**options))


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The stand-in's executor module, with everything installed."""
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def engine(fake, checkpoint, tmp_path_factory):
    target = tmp_path_factory.mktemp("engines") / "small"
    return compile_engine(checkpoint, make_config(), "fp16", target)


@pytest.fixture(scope="module")
def facts(checkpoint):
    return checkpoint.facts


@pytest.fixture
def opened(engine, fake):
    """Open the engine with settings of `TrtllmConfig`; gives runtime and executor."""
    runtimes = []

    def opened(**trtllm):
        runtimes.append(open_runtime(engine, make_config(**trtllm).runtime))
        return runtimes[-1], fake.Executor.instances[-1]

    yield opened
    for runtime in runtimes:
        runtime.close()


def test_the_executor_is_configured_for_whisper(opened, fake):
    _, executor = opened(kv_cache_fraction=0.6)
    config = executor.config
    assert config.kv_cache_config.enable_block_reuse is False
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.6
    assert config.kv_cache_config.cross_kv_cache_fraction == 0.75
    assert config.batching_type is fake.BatchingType.INFLIGHT
    assert config.normalize_log_probs is False
    assert (config.max_batch_size, config.max_beam_width) == (4, 1)
    assert config.parallel_config is None


def test_another_gpu_of_the_machine_is_named_to_the_executor(engine, fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = dataclasses.replace(make_config().runtime, device="cuda:1")
    open_runtime(engine, config).close()
    assert fake.Executor.instances[-1].config.parallel_config.device_ids == [1]


def test_requests_carry_what_whisper_needs(opened, facts):
    runtime, executor = opened()
    job = make_job(max_tokens=7)
    run(runtime, [job])
    (request,) = executor.requests
    assert request.input_token_ids == list(TIMED)
    assert request.max_tokens == 7
    assert request.end_id == facts.eot
    assert request.encoder_output_length == 1500
    assert torch.equal(request.encoder_input_features, job.features.half().T)
    assert request.output_config.exclude_input_from_output
    assert request.streaming
    assert request.sampling_config.top_k == 1


def test_sampling_asks_for_the_whole_distribution(opened):
    runtime, executor = opened()
    run(runtime, [make_job(temperature=0.4, seed=17)])
    sampling = executor.requests[0].sampling_config
    assert (sampling.top_k, sampling.top_p) == (None, 1.0)
    assert (sampling.temperature, sampling.seed) == (0.4, 17)


@pytest.fixture(scope="module")
def beams_of_3(fake, checkpoint, tmp_path_factory):
    """An engine built for beams of 3."""
    target = tmp_path_factory.mktemp("engines") / "beams"
    return compile_engine(checkpoint, make_config(beam_width=3), "fp16", target)


def test_a_job_has_the_beam_that_it_asks_for(beams_of_3, fake):
    runtime = open_runtime(beams_of_3, make_config(beam_width=3).runtime)
    executor, able = fake.Executor.instances[-1], runtime.capabilities
    assert (able.beam_width, able.beam_sizes, able.streaming) == (3, (1, 3), False)
    jobs = [make_job(1), make_job(2, beam_size=3), make_job(3, DETECT, beam_size=3)]
    run(runtime, [*jobs, make_job(4, temperature=0.5)])
    found = [request.sampling_config for request in executor.requests]
    penalties = {(s.beam_width, s.top_k, s.length_penalty) for s in found if s.top_p is None}
    assert penalties == {(1, 1, None), (3, None, 1.0)}
    assert [s.beam_width for s in found] == [1, 3, 1, 1, 3], "a probe and a sample have no beam"
    runtime.close()


def test_the_encoder_batches_what_its_budget_allows(opened):
    runtime, executor = opened()
    run(runtime, [make_job(id, max_tokens=3) for id in range(6)])
    assert max(executor.encoded_together) == 2  # `encoder_batch`
    assert sum(executor.encoded_together) == 6


def test_tokens_stream_and_the_average_covers_the_end(opened, fake):
    runtime, _ = opened()
    job = make_job()
    runtime.submit(job)
    events = []
    while not events or events[-1].finished is None:
        events += runtime.poll(0.01)
    assert len(events) > 3
    assert all(len(event.tokens) == 1 for event in events[:-1])
    tokens = [token for event in events for token in event.tokens]
    whole = run(runtime, [dataclasses.replace(job, id=2)])[2]
    assert tuple(tokens) == whole.tokens
    assert math.isfinite(whole.last.scores.avg_logprob)
    assert whole.last.scores.avg_logprob < -0.01  # 0 if normalised over the one candidate


def test_detection_probes_once_and_fills_the_prompt(opened, facts):
    runtime, executor = opened()
    ended = run(runtime, [make_job(1, DETECT), make_job(2, TIMED)])
    probes = [r for r in executor.requests if r.output_config.return_generation_logits]
    assert [(p.input_token_ids, p.max_tokens) for p in probes] == [([facts.sot], 1)]
    found = ended[1].last.scores
    assert found.language in facts.languages.values()
    assert [facts.sot, found.language, facts.transcribe] in [
        request.input_token_ids for request in executor.requests
    ]
    assert ended[2].last.scores.language is None
    assert ended[2].last.scores.no_speech_prob is None


def test_the_callback_takes_its_arguments_in_the_librarys_order():
    parameters = list(inspect.signature(RulesCallback.__call__).parameters)
    assert parameters[1:] == POST_PROCESSOR


def test_the_callback_forbids_by_row_and_leaves_the_rest(checkpoint, facts):
    callback, n_vocab = RulesCallback(facts, checkpoint.dims), checkpoint.dims.n_vocab
    requests = {
        7: ExecutorRequest(TIMED, torch.zeros(1), 9, timestamps=True),
        8: ExecutorRequest(PLAIN, torch.zeros(1), 9),
    }
    callback.requests.update(requests)
    first, second, stranger = (torch.zeros(1, n, n_vocab).half() for n in (2, 1, 1))
    begin = facts.timestamp_begin
    beams = [[*TIMED, begin + 4, 50], [*TIMED, begin + 4, 51, begin + 9]]
    callback([1, 2, 3], [first, second, stranger], [beams, [[*PLAIN]], [[1]]], 0, [7, 8, None])
    allowed = [set(torch.nonzero(row == 0).flatten().tolist()) for row in first[0]]
    text = set(range(facts.eot)) - set(facts.suppress_tokens)
    # Equal logits: 1,501 timestamps together outweigh any text, so a timestamp must come. One
    # that ends the text may not precede the one that opened it; an open pair repeats its last.
    assert allowed[0] == set(range(begin + 5, n_vocab))
    assert allowed[1] == set(range(begin + 9, n_vocab))
    plain = set(torch.nonzero(second[0, 0] == 0).flatten().tolist())
    assert plain & set(range(facts.eot)) == text - set(facts.begin_suppress_tokens)
    assert facts.eot not in plain  # forbidden as the first token
    assert not stranger.any()


def test_a_refused_window_ends_alone(opened):
    runtime, executor = opened()
    executor.network.encoder_config["n_mels"] = 81  # as if the engine were another's
    last = run(runtime, [make_job(1)])[1].last
    assert last.finished == "error"
    assert isinstance(last.error, EarshotError)
    assert "features have 80 mels" in str(last.error)
    executor.network.encoder_config["n_mels"] = 80
    assert run(runtime, [make_job(2)])[2].last.finished in ("eot", "length")


def test_a_broken_executor_is_a_device_error(opened):
    runtime, executor = opened()
    runtime.submit(make_job(1))
    executor.broken = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(DeviceError, match="illegal memory access"):
        runtime.poll(0.01)
    executor.shutdown()
    with pytest.raises(DeviceError, match="rejected a request"):
        runtime.submit(make_job(2))


def test_jobs_beyond_the_build_are_refused(opened):
    runtime, _ = opened()
    with pytest.raises(OptionError, match="at most 228 tokens"):
        runtime.submit(make_job(1, (5,) * 300 + TIMED))
    assert runtime.poll(0.0) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 5}, r"runtime\.slots = 5, but the engine was built for at most 4"),
        ({"beam_width": 2}, r"beam_width = 2, but the engine was built for at most 1"),
        ({"python": "/usr/bin/python3"}, r"python = '.*' is for engines of the LLM API, .*; leave"),
    ],
)
def test_settings_beyond_the_build_are_refused(engine, change, words):
    config = make_config(**{k: v for k, v in change.items() if k != "slots"}).runtime
    config = dataclasses.replace(config, slots=change.get("slots", 4))
    with pytest.raises(ConfigError, match=words):
        open_runtime(engine, config)


def altered(engine, tmp_path, **options):
    """The engine with other limits in its manifest."""
    manifest = engine.manifest
    limits = {**manifest.runtime_options, **options}
    return Engine(tmp_path, dataclasses.replace(manifest, runtime_options=limits))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensorrt_llm": "1.2.0"}, r"TensorRT-LLM 1\.2\.0 .*, found 1\.2\.1 and 9\.0 "),
        ({"max_windows": 3}, "runtime_options: unknown key 'max_windows'; .*; build it again"),
    ],
)
def test_engines_made_elsewhere_are_refused(engine, tmp_path, options, words):
    with pytest.raises(EngineError, match=words):
        open_runtime(altered(engine, tmp_path, **options), make_config().runtime)


def test_an_engine_of_another_runtime_is_refused(engine, tmp_path):
    from serve.trtllm.executor import open_tensorrt_llm

    native = Engine(tmp_path, dataclasses.replace(engine.manifest, runtime="native"))
    with pytest.raises(EngineError, match="is for the runtime 'native', expected 'tensorrt_llm'"):
        open_tensorrt_llm(native, make_config().runtime)


def test_what_the_library_says_on_opening_reaches_the_user(engine, tmp_path):
    lying = altered(engine, tmp_path, max_beam_width=4)
    (tmp_path / ENGINES_FOLDER).symlink_to(engine.path / ENGINES_FOLDER)
    with pytest.raises(
        Unavailable, match=r"cannot run the engine in .*: runtime max_beam_width ex"
    ):
        open_runtime(lying, make_config(beam_width=4).runtime)
