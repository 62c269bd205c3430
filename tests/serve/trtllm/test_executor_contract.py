"""TensorRTLLMRuntime under the assertions that every runtime must pass.

On the stand-in; or, where TensorRT-LLM 1.2 and a GPU are, on the real library.
"""

import dataclasses

import pytest
import torch

from build.checkpoint import open_checkpoint
from serve.config import Config, RuntimeConfig, TranscriberConfig
from serve.errors import UnavailableError
from serve.messages import Request
from serve.runtime.table import open_runtime as open_engine_runtime
from serve.speech.features import SAMPLE_RATE
from serve.speech.languages import LANGUAGE_NAMES
from serve.transcriber.open import open_transcriber
from serve.trtllm.limits import find_gpu, library_version
from tests.checkpoints import NANO, random_weights, write_engine, write_hf
from tests.fake_trtllm.install import compile_engine, install
from tests.serve.runtime.test_contract import (  # noqa: F401 - collected here, run with the fixtures below
    SLOTS,
    facts,
    job,
    runtime,
    test_a_job_that_can_never_run_is_refused,
    test_answers_do_not_depend_on_the_company,
    test_cancelled_jobs_end_once_and_free_their_slots,
    test_capabilities_fit_the_configuration,
    test_closing_drops_what_runs,
    test_every_job_ends_once_even_beyond_the_slots,
    test_gauges_count_the_work,
    test_length_means_that_max_tokens_were_sampled,
    test_naming_the_language_found_changes_nothing,
    test_sampling_follows_its_seed,
    test_scores_are_probabilities,
    test_the_context_bounds_what_is_sampled,
    test_the_language_is_told_where_it_was_asked_for,
    test_with_nothing_to_do_nothing_happens,
)


def is_real():
    """Whether TensorRT-LLM and its GPU are here."""
    try:
        return bool(library_version() and find_gpu("cuda"))
    except UnavailableError:
        return False


CONFIG = Config(runtime=RuntimeConfig(device="cuda", slots=SLOTS, encoder_batch=2))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("nano") / "checkpoint"
    return open_checkpoint(str(write_hf(folder, NANO, random_weights(NANO))))


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    """It as a native engine; FP16, since TensorRT-LLM rounds INT8 in its own way."""
    target = tmp_path_factory.mktemp("native") / "engine"
    return write_engine(checkpoint, target, "fp16")


@pytest.fixture(scope="module", params=["real" if is_real() else "stand-in"])
def compiled(request, checkpoint, tmp_path_factory):
    """It as an engine of TensorRT-LLM."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stand-in":
            install(patch, folder)
        yield compile_engine(checkpoint, CONFIG, "fp16", folder / "engine")


@pytest.fixture
def open_runtime(compiled):
    """Open a fresh runtime; all are closed at the end."""
    opened = []

    def open_runtime():
        opened.append(open_engine_runtime(compiled, CONFIG.runtime))
        return opened[-1]

    yield open_runtime
    for each in opened:
        each.close()


def test_it_says_what_the_native_runtime_says(runtime, engine, job):  # noqa: F811
    """Same weights, same rules, another way: equal tokens, languages and log-probabilities."""
    from serve.native.runtime import NativeRuntime  # noqa: PLC0415

    native = NativeRuntime(engine, RuntimeConfig(slots=SLOTS, threads=1))
    for id in range(6):
        asked = job(id, language=None if id % 2 else "es", timestamps=id < 4, max_tokens=20)
        ours, theirs = only_event(runtime, asked), only_event(native, asked)
        assert ours[:2] == theirs[:2]
        assert ours[2].language == theirs[2].language
        torch.testing.assert_close(ours[2].avg_logprob, theirs[2].avg_logprob, atol=2e-2, rtol=1e-2)


def only_event(runtime, asked):  # noqa: F811
    runtime.submit(asked)
    tokens = ()
    for _ in range(1000):
        for event in runtime.poll(0.05):
            tokens += event.tokens
            if event.finished:
                return tokens, event.finished, event.scores
    raise AssertionError("never finished")


def test_audio_becomes_text_through_the_whole_path(compiled):
    """Manifest to runtime to transcriber: the same call as for a native engine."""
    config = dataclasses.replace(
        CONFIG,
        engine=str(compiled.path),
        transcriber=TranscriberConfig(max_tokens=8, temperatures=(0.0, 0.5)),
    )
    samples = torch.randn(40 * SAMPLE_RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    with open_transcriber(config) as transcriber:
        transcript = transcriber.transcribe(Request(samples.numpy(), sample_rate=SAMPLE_RATE))
    assert transcript.duration == 40.0
    assert transcript.language in LANGUAGE_NAMES
    assert transcriber.stats().windows >= 3
