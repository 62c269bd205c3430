"""The LLM API under the assertions that every runtime must pass.

On the stand-in; or, where TensorRT-LLM 1.3 or later and a GPU are, on the real library.
"""

import dataclasses

import pytest
import torch

from serve.config import Config, RuntimeConfig, TranscriberConfig
from serve.engine import mel_filters
from serve.errors import UnavailableError
from serve.messages import Request
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Job
from serve.runtime.table import open_runtime as open_engine_runtime
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES, log_mel
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.open import open_transcriber
from serve.trtllm.limits import api_version, find_gpu
from tests.checkpoints import NANO, write_engine
from tests.fake_trtllm.install import copy_engine, install_api, write_checkpoint_with_processor
from tests.serve.runtime.test_contract import (  # noqa: F401 - collected here, run with the fixtures below
    SLOTS,
    facts,
    run,
    runtime,
    test_a_job_that_can_never_run_is_refused,
    test_answers_do_not_depend_on_the_company,
    test_cancelled_jobs_end_once_and_free_their_slots,
    test_capabilities_fit_the_configuration,
    test_closing_drops_what_runs,
    test_every_job_ends_once_even_beyond_the_slots,
    test_length_means_that_max_tokens_were_sampled,
    test_sampling_follows_its_seed,
    test_scores_are_probabilities,
    test_the_context_bounds_what_is_sampled,
    test_with_nothing_to_do_nothing_happens,
)

CONFIG = Config(runtime=RuntimeConfig(device="cuda", slots=SLOTS, encoder_batch=2))


def is_real():
    """Whether the library and its GPU are here."""
    try:
        return bool(api_version() and find_gpu("cuda"))
    except UnavailableError:
        return False


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint with random weights."""
    return write_checkpoint_with_processor(tmp_path_factory.mktemp("nano") / "checkpoint")


@pytest.fixture(scope="module", params=["real" if is_real() else "stand-in"])
def engine(request, checkpoint, tmp_path_factory):
    """It as an engine for the LLM API."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stand-in":
            install_api(patch)
        target = tmp_path_factory.mktemp("api") / "engine"
        yield copy_engine(checkpoint, target)


@pytest.fixture
def open_runtime(engine):
    """Open a fresh runtime; all are closed at the end."""
    opened = []

    def open_runtime():
        opened.append(open_engine_runtime(engine, CONFIG.runtime))
        return opened[-1]

    yield open_runtime
    for each in opened:
        each.close()


@pytest.fixture
def job(engine):
    """Make a job of samples; equal keys have equal samples."""
    tokenizer = Tokenizer.open(engine)

    def job(id, key=None, language="en", timestamps=False, prompt="", **options):
        generator = torch.Generator().manual_seed(id if key is None else key)
        pitch_hz, loudness = 100 + 4000 * torch.rand(3, 1, generator=generator), 0.1
        length = int(torch.randint(SAMPLE_RATE, WINDOW_SAMPLES + 1, (), generator=generator))
        tones = (2 * torch.pi * pitch_hz * torch.arange(length) / SAMPLE_RATE).sin().sum(dim=0)
        samples = loudness * tones + 0.01 * torch.randn(length, generator=generator)
        ids = tokenizer.prompt_ids(language, "transcribe", timestamps, prompt)
        options = {"max_tokens": 12, **options}
        return Job(id, samples, ids, DecodingOptions(timestamps=timestamps, **options))

    return job


def test_gauges_count_windows_and_tokens(runtime, job):  # noqa: F811
    """Steps are not counted: the API tells of them only by waiting."""
    ended = run(runtime, [job(id) for id in range(5)])
    sampled = sum(len(entry.tokens) for entry in ended.values())
    ends = sum(entry.last.finished == "eot" for entry in ended.values())
    gauges = runtime.gauges()
    assert (gauges.windows, gauges.tokens) == (5, sampled + ends)
    assert (gauges.steps, gauges.step_slots) == (0, 0)


def test_it_says_what_the_native_runtime_says(runtime, checkpoint, job, tmp_path):  # noqa: F811
    """Samples to tokens: log-mel, network and suppression by the library and by us are the same."""
    engine = write_engine(checkpoint, tmp_path / "native", "fp16")
    native = NativeRuntime(engine, RuntimeConfig(slots=SLOTS, threads=1))
    jobs = [job(id, language="es" if id % 2 else "en", max_tokens=20) for id in range(6)]
    ours = run(runtime, jobs)
    theirs = run(native, [dataclasses.replace(each, features=mel(each.features)) for each in jobs])
    native.close()
    assert len({entry.tokens for entry in theirs.values()}) > 3, "the jobs all say the same"
    for each in jobs:
        assert ours[each.id].result == theirs[each.id].result
        found, expected = (e[each.id].last.scores.avg_logprob for e in (ours, theirs))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)


def mel(samples):
    padded = torch.zeros(1, WINDOW_SAMPLES)
    padded[0, : len(samples)] = samples
    return log_mel(padded, mel_filters(NANO.n_mels))[0]


def test_audio_becomes_text_through_the_whole_path(engine):
    """Manifest to runtime to transcriber: the same call as for a native engine."""
    config = dataclasses.replace(
        CONFIG,
        engine=str(engine.path),
        transcriber=TranscriberConfig(max_tokens=8, temperatures=(0.0, 0.5)),
    )
    samples = torch.randn(40 * SAMPLE_RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    request = Request(samples.numpy(), sample_rate=SAMPLE_RATE, language="es", timestamps=False)
    with open_transcriber(config) as transcriber:
        first, second = transcriber.transcribe(request), transcriber.transcribe(request)
        assert transcriber.healthy
        assert transcriber.stats().windows >= 5
    assert (first.duration, first.language) == (40.0, "es")
    assert first.segments
    assert first.segments == second.segments
