"""Every runtime that tests run against, with an engine, a way to open it, and jobs that it takes.

A `Subject` is one of them. TensorRT-LLM is the stand-in's, or, where the library and a GPU are, the
real one.
"""

import collections
import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from serve.contract.config import Config, RuntimeConfig
from serve.contract.engine import Engine, open_engine
from serve.contract.errors import UnavailableError
from serve.contract.runtimes import TrtllmConfig
from serve.native.process import ProcessRuntime
from serve.native.runtime import NativeRuntime
from serve.runtime.loader import open_runtime
from serve.runtime.protocol import DecodingOptions, Job, Runtime
from serve.speech.features import N_FRAMES, SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.tokenizer import Tokenizer
from serve.trtllm.limits import find_gpu
from serve.trtllm.release import api_version, library_version
from tests.fake_trtllm.install import (
    compile_engine,
    copy_engine,
    install,
    install_api,
    write_checkpoint_with_processor,
)
from tests.fakes import CAPABILITIES, FakeRuntime, Play

SLOTS = 3
MOST_POLLS = 20_000  # far more than any test needs; a runtime that never ends must not hang them
TRTLLM = Config(runtime=RuntimeConfig(device="cuda", slots=SLOTS, encoder_batch=2))
# In another environment, with the real library; `python -m eval trtllm-check` names it.
PYTHON = os.environ.get("EARSHOT_TRTLLM_PYTHON", "")
LLM_API = dataclasses.replace(
    TRTLLM, runtime=dataclasses.replace(TRTLLM.runtime, tensorrt_llm=TrtllmConfig(python=PYTHON))
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A runtime under test."""

    engine: Engine
    open: Callable[[], Runtime]
    job: Callable[..., Job]  # (id, key=, language=, timestamps=, prompt=, **decoding options)
    counts_steps: bool = True


@contextlib.contextmanager
def fake(folders, nano_engine) -> Iterator[Subject]:
    """Says tokens that depend on the features, and on the seed where it samples."""
    engine = open_engine(nano_engine)
    facts = engine.manifest.tokenizer

    def script(job):
        key = float(job.features.double().sum())
        dice = random.Random(f"{key} {job.options.seed if job.options.temperature else ''}")
        count = dice.randrange(5, 60)
        tokens = tuple(dice.randrange(facts.eot) for _ in range(count))
        top_language = dice.choice(list(facts.languages.values())), dice.random()
        found = {
            "language": top_language[0],
            "language_prob": top_language[1],
            "top_language": top_language,
        }
        return Play(tokens, delay=dice.randrange(3), **found)

    capabilities = dataclasses.replace(
        CAPABILITIES, max_windows=SLOTS, beam_width=4, search_options=True
    )
    n_text_ctx = engine.manifest.dims.n_text_ctx
    yield Subject(engine, lambda: FakeRuntime(script, capabilities, n_text_ctx), mel_job(engine))


def native(apart=False, **settings):
    """The native runtime, with settings of `RuntimeConfig`; `apart`: in a separate process."""
    config = RuntimeConfig(**{"slots": SLOTS, "encoder_batch": 2, "threads": 1, **settings})

    @contextlib.contextmanager
    def subject(folders, nano_engine):
        engine = open_engine(nano_engine)
        runtime, make_job = (ProcessRuntime, samples_job) if apart else (NativeRuntime, mel_job)
        yield Subject(engine, lambda: runtime(engine, config), make_job(engine))

    return subject


@contextlib.contextmanager
def executor(folders, nano_engine):
    """TensorRT-LLM 1.2's executor, on the nano checkpoint compiled for it."""
    with executor_engine(nano_checkpoint(folders), folders.mktemp("compiled")) as engine:
        yield Subject(engine, lambda: open_runtime(engine, TRTLLM.runtime), mel_job(engine))


@contextlib.contextmanager
def api(folders, nano_engine):
    """TensorRT-LLM 1.3's LLM API, which takes samples, on the nano checkpoint."""
    with api_engine(nano_checkpoint(folders), folders.mktemp("api")) as engine:
        yield Subject(
            engine,
            lambda: open_runtime(engine, LLM_API.runtime),
            samples_job(engine),
            counts_steps=False,
        )


SUBJECTS = [
    pytest.param(fake, id="fake"),
    pytest.param(native(), id="native-cpu", marks=pytest.mark.nightly),
    pytest.param(native(rows=8), id="native-rows"),
    # One window per encoder batch: the library's products may sum several in another order.
    pytest.param(native(device="cuda", encoder_batch=1), id="native-gpu", marks=pytest.mark.gpu),
    pytest.param(
        native(device="cuda", encoder_batch=1, cuda_graph=True),
        id="native-gpu-graphs",
        marks=pytest.mark.gpu,
    ),
    pytest.param(
        native(device="cuda", encoder_batch=1, cuda_graph=True, rows=8),
        id="native-gpu-graphs-rows",
        marks=pytest.mark.gpu,
    ),
    # Beside what tests/serve/native/test_process.py asks of it.
    pytest.param(native(apart=True, rows=8), id="native-apart-rows", marks=pytest.mark.nightly),
    pytest.param(
        native(apart=True, device="cuda", encoder_batch=1, cuda_graph=True, rows=8),
        id="native-apart-gpu-graphs-rows",
        marks=pytest.mark.gpu,
    ),
    # Beside what tests/serve/trtllm asks of them.
    pytest.param(executor, id="executor", marks=pytest.mark.nightly),
    pytest.param(api, id="llm_api", marks=pytest.mark.nightly),
]


def nano_checkpoint(folders):
    """A small checkpoint with random weights, and what the LLM API reads beside it."""
    return write_checkpoint_with_processor(folders.mktemp("nano") / "checkpoint")


def is_real(version):
    """Whether the library of this `version` and its GPU are here."""
    try:
        return bool(version() and find_gpu("cuda"))
    except UnavailableError:
        return False


@contextlib.contextmanager
def executor_engine(checkpoint, folder):
    """A checkpoint compiled for the executor; the stand-in is installed meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_real(library_version):
            install(patch, folder)
        yield compile_engine(checkpoint, TRTLLM, "fp16", folder / "engine")


@contextlib.contextmanager
def api_engine(checkpoint, folder):
    """A checkpoint as an engine for the LLM API; the stand-in is installed meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        if not PYTHON and not is_real(api_version):
            install_api(patch)
        yield copy_engine(checkpoint, folder / "engine")


def job_maker(engine, audio_of, stamped):
    """A maker of jobs; `audio_of`: features or samples of a generator; `stamped`: timestamps."""
    tokenizer = Tokenizer(engine)

    def job(id, key=None, language="en", timestamps=stamped, prompt="", **options):
        audio = audio_of(torch.Generator().manual_seed(id if key is None else key))
        before = tokenizer.previous_text(prompt)
        ids = (tokenizer.facts.sot_prev, *before) if before else ()
        ids += tokenizer.prompt_ids(language, "transcribe", timestamps)
        options = {"max_tokens": 12, **options}
        return Job(id, audio, ids, DecodingOptions(timestamps=timestamps, **options))

    return job


def mel_job(engine):
    """A maker of jobs of log-mel; equal keys have equal features."""
    shape = engine.manifest.dims.n_mels, N_FRAMES
    return job_maker(engine, lambda generator: torch.randn(shape, generator=generator), True)


def samples_job(engine):
    """A maker of jobs of samples; equal keys have equal samples."""
    return job_maker(engine, tones, False)


def tones(generator):
    pitch_hz, loudness = 100 + 4000 * torch.rand(3, 1, generator=generator), 0.1
    length = int(torch.randint(SAMPLE_RATE, WINDOW_SAMPLES + 1, (), generator=generator))
    mixed = (2 * torch.pi * pitch_hz * torch.arange(length) / SAMPLE_RATE).sin().sum(dim=0)
    return loudness * mixed + 0.01 * torch.randn(length, generator=generator)


@dataclasses.dataclass
class Ended:
    """What became of one job."""

    tokens: tuple[int, ...] = ()
    last: object = None
    began_s: float | None = None

    @property
    def result(self):
        return self.tokens, self.last.finished, self.last.scores.language

    def add(self, event):
        assert self.last is None, f"{event} after {self.last}"
        self.tokens += event.tokens
        self.last = event if event.finished else None


def collect(runtime, ended, ids):
    """Poll until each of the jobs has ended; the rules of `JobEvent` are checked on the way."""
    for _ in range(MOST_POLLS):
        if all(ended[id].last for id in ids):
            return
        for event in runtime.poll(0.01):
            entry = ended[event.job_id]
            entry.add(event)
            if event.began_s is not None:
                assert runtime.capabilities.reports_begin and entry.began_s is None
                entry.began_s = event.began_s
            if event.finished:
                has_scores = event.finished in ("eot", "length", "loop")
                assert (event.scores is not None) == has_scores
                assert (event.error is not None) == (event.finished == "error")
            else:
                assert event.began_s or (runtime.capabilities.streaming and event.tokens)
    raise AssertionError(f"unfinished after {MOST_POLLS} polls: {ended}")


def run(runtime, jobs):
    """Submit jobs together; returns what became of each, by id."""
    ended = collections.defaultdict(Ended)
    for job in jobs:
        runtime.submit(job)
    collect(runtime, ended, [job.id for job in jobs])
    assert runtime.gauges().busy_slots == 0
    assert runtime.gauges().queued == 0
    assert set(ended) == {job.id for job in jobs}
    return ended


@contextlib.contextmanager
def opener(open_one):
    """Gives a function that opens fresh runtimes; all are closed at the end."""
    opened = []

    def open_another():
        opened.append(open_one())
        return opened[-1]

    yield open_another
    for runtime in opened:
        runtime.close()
