"""What every runtime must do: the same assertions over each implementation of `Runtime`."""

import collections
import dataclasses
import random

import pytest
import torch

from serve.config import Config, RuntimeConfig, TranscriberConfig
from serve.engine import DETECT_LANGUAGE, open_engine
from serve.errors import OptionError
from serve.messages import Request
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Job
from serve.speech.features import N_FRAMES, SAMPLE_RATE
from serve.speech.languages import LANGUAGE_NAMES
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.open import open_transcriber
from tests.fakes import CAPABILITIES, FakeRuntime, Play

SLOTS = 3
MOST_POLLS = 20_000  # far more than any test needs; a runtime that never ends must not hang them


@pytest.fixture(scope="module")
def engine(nano_engine):
    """Random weights: what is said depends on everything and means nothing."""
    return open_engine(nano_engine)


@pytest.fixture(scope="module")
def facts(engine):
    return engine.manifest.tokenizer


def fake_runtime(engine):
    """Says tokens that depend on the features, and on the seed where it samples."""
    facts = engine.manifest.tokenizer

    def script(job):
        key = float(job.features.double().sum())
        dice = random.Random(f"{key} {job.options.seed if job.options.temperature else ''}")
        count = dice.randrange(5, 60)
        tokens = tuple(dice.randrange(facts.eot) for _ in range(count))
        language = dice.choice(list(facts.languages.values()))
        return Play(tokens, delay=dice.randrange(3), language=language, language_prob=dice.random())

    capabilities = dataclasses.replace(CAPABILITIES, max_windows=SLOTS)
    return FakeRuntime(script, capabilities, engine.manifest.dims.n_text_ctx)


def native_runtime(engine):
    return NativeRuntime(engine, RuntimeConfig(slots=SLOTS, encoder_batch=2, threads=1))


@pytest.fixture(params=[fake_runtime, native_runtime], ids=["fake", "native-cpu"])
def open_runtime(request, engine):
    """Open a fresh runtime; all are closed at the end."""
    opened = []

    def open_runtime():
        opened.append(request.param(engine))
        return opened[-1]

    yield open_runtime
    for runtime in opened:
        runtime.close()


@pytest.fixture
def runtime(open_runtime):
    return open_runtime()


@pytest.fixture
def job(engine):
    """Make a job; equal keys have equal features."""
    tokenizer = Tokenizer.open(engine)

    def job(id, key=None, language="en", timestamps=True, prompt="", **options):
        generator = torch.Generator().manual_seed(id if key is None else key)
        features = torch.randn(engine.manifest.dims.n_mels, N_FRAMES, generator=generator)
        ids = tokenizer.prompt_ids(language, "transcribe", timestamps, prompt)
        options = {"max_tokens": 12, **options}
        return Job(id, features, ids, DecodingOptions(timestamps=timestamps, **options))

    return job


@dataclasses.dataclass
class Ended:
    """What became of one job."""

    tokens: tuple[int, ...] = ()
    last: object = None

    @property
    def result(self):
        return self.tokens, self.last.finished, self.last.scores.language


def collect(runtime, ended, ids):
    """Poll until each of the jobs has ended; the rules of `Event` are checked on the way."""
    for _ in range(MOST_POLLS):
        if all(ended[id].last for id in ids):
            return
        for event in runtime.poll(0.01):
            entry = ended[event.job_id]
            assert entry.last is None, f"{event} after {entry.last}"
            entry.tokens += event.tokens
            if event.finished:
                entry.last = event
                has_scores = event.finished in ("eot", "length")
                assert (event.scores is not None) == has_scores
                assert (event.error is not None) == (event.finished == "error")
            else:
                assert runtime.capabilities.streaming
                assert event.tokens
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


def test_with_nothing_to_do_nothing_happens(runtime):
    assert runtime.poll(0.0) == []
    assert runtime.poll(0.01) == []
    assert (runtime.gauges().busy_slots, runtime.gauges().queued) == (0, 0)


def test_capabilities_fit_the_configuration(runtime):
    assert runtime.capabilities.max_windows == SLOTS
    assert runtime.capabilities.beam_width >= 1


def test_every_job_ends_once_even_beyond_the_slots(runtime, job, engine, facts):
    ended = run(runtime, [job(id) for id in range(3 * SLOTS + 1)])
    for entry in ended.values():
        assert entry.last.finished in ("eot", "length")
        assert len(entry.tokens) <= 12
        assert facts.eot not in entry.tokens
        assert all(0 <= token < engine.manifest.dims.n_vocab for token in entry.tokens)


def test_length_means_that_max_tokens_were_sampled(runtime, job):
    ended = run(runtime, [job(id, max_tokens=2 + id) for id in range(6)])
    reasons = set()
    for id, entry in ended.items():
        reasons.add(entry.last.finished)
        if entry.last.finished == "length":
            assert len(entry.tokens) == 2 + id
        else:
            assert len(entry.tokens) < 2 + id  # the end of text counts as one
    assert "length" in reasons


def test_the_context_bounds_what_is_sampled(runtime, job, engine):
    text = "word " * 400 if runtime.capabilities.previous_text else ""
    made = job(1, prompt=text, max_tokens=10_000)
    (entry,) = run(runtime, [made]).values()
    assert len(made.prompt) + len(entry.tokens) <= engine.manifest.dims.n_text_ctx


def test_a_job_that_can_never_run_is_refused(runtime, job):
    with pytest.raises(OptionError):
        runtime.submit(dataclasses.replace(job(1), prompt=job(1).prompt * 200))
    with pytest.raises(OptionError):
        runtime.submit(job(1, max_tokens=0))
    assert runtime.poll(0.0) == []


def test_scores_are_probabilities(runtime, job):
    able = runtime.capabilities
    for entry in run(runtime, [job(id) for id in range(4)]).values():
        scores = entry.last.scores
        assert (scores.avg_logprob is not None) == able.token_logprobs
        assert (scores.no_speech_prob is not None) == able.no_speech_prob
        assert scores.avg_logprob is None or scores.avg_logprob <= 0
        assert scores.no_speech_prob is None or 0 <= scores.no_speech_prob <= 1
        assert scores.encode_s >= 0
        assert scores.decode_s >= 0


def test_the_language_is_told_where_it_was_asked_for(runtime, job, facts):
    jobs = [job(id, language=None if id % 2 else "en") for id in range(6)]
    assert DETECT_LANGUAGE in jobs[1].prompt
    for id, entry in run(runtime, jobs).items():
        scores = entry.last.scores
        if id % 2:
            assert scores.language in facts.languages.values()
            assert 0 < scores.language_prob <= 1
        else:
            assert scores.language is None
            assert scores.language_prob is None


def test_naming_the_language_found_changes_nothing(runtime, job, facts):
    codes = {token: code for code, token in facts.languages.items()}
    for id in range(3):
        (found,) = run(runtime, [job(id, key=id, language=None)]).values()
        code = codes[found.last.scores.language]
        (named,) = run(runtime, [job(id + 10, key=id, language=code)]).values()
        assert named.tokens == found.tokens


def mixed(job, id, able):
    """Jobs of every sort that the runtime is able to do; equal ids are equal jobs."""
    dice = random.Random(id)
    return job(
        id,
        language=dice.choice([None, "en", "es"] if able.detect_language else ["en", "es"]),
        timestamps=dice.choice([True, False] if able.timestamps else [False]),
        prompt=dice.choice(["", "some words before"] if able.previous_text else [""]),
        temperature=dice.choice([0.0, 0.0, 0.8]),
        max_tokens=dice.randrange(1, 30),
        seed=dice.randrange(1000),
    )


def test_answers_do_not_depend_on_the_company(open_runtime, job):
    alone = open_runtime()
    jobs = [mixed(job, id, alone.capabilities) for id in range(12)]
    expected = {each.id: run(alone, [each])[each.id].result for each in jobs}
    assert len(set(expected.values())) > 6, "the jobs all say the same"

    together, ended = open_runtime(), collections.defaultdict(Ended)
    dice, waiting = random.Random(1), list(jobs)
    dice.shuffle(waiting)
    extra = 1000
    while waiting:  # jobs join while others decode; some of those leave half-way
        together.submit(job(extra, max_tokens=40))
        for _ in range(min(len(waiting), dice.randrange(1, 4))):
            together.submit(waiting.pop())
        steps = dice.randrange(1, 8)
        for step in range(steps):
            for event in together.poll(0.0):
                entry = ended[event.job_id]
                entry.tokens += event.tokens
                entry.last = event if event.finished else None
            if step == steps // 2 and together.capabilities.cancel:
                together.cancel(extra)
        extra += 1
    collect(together, ended, expected)
    assert {id: ended[id].result for id in expected} == expected


def test_sampling_follows_its_seed(runtime, job):
    def sample(id, seed):
        made = job(id, key=5, temperature=1.0, seed=seed, max_tokens=25)
        return run(runtime, [made])[id].tokens

    first = sample(1, seed=3)
    assert sample(2, seed=3) == first
    assert {sample(3 + i, seed=100 + i) for i in range(4)} != {first}


def test_cancelled_jobs_end_once_and_free_their_slots(runtime, job):
    assert runtime.capabilities.cancel, "every runtime can; say here what one must do that cannot"
    ended = collections.defaultdict(Ended)
    for id in range(2 * SLOTS):
        runtime.submit(job(id, max_tokens=50))
    runtime.cancel(2 * SLOTS - 1)  # waits
    for event in runtime.poll(0.0):  # now others hold slots
        ended[event.job_id].tokens += event.tokens
        ended[event.job_id].last = event if event.finished else None
    running = [id for id in range(SLOTS) if ended[id].last is None]
    runtime.cancel(running[0])
    runtime.cancel(running[0])
    runtime.cancel(12345)
    collect(runtime, ended, range(2 * SLOTS))
    cancelled = {id for id, entry in ended.items() if entry.last.finished == "cancelled"}
    assert cancelled == {running[0], 2 * SLOTS - 1}
    assert runtime.gauges().busy_slots == 0
    runtime.cancel(0)
    assert runtime.poll(0.0) == []
    run(runtime, [job(100 + id) for id in range(SLOTS)])


def test_gauges_count_the_work(runtime, job):
    ended = run(runtime, [job(id) for id in range(5)])
    gauges = runtime.gauges()
    sampled = sum(len(entry.tokens) for entry in ended.values())
    ends = sum(entry.last.finished == "eot" for entry in ended.values())
    assert gauges.windows == 5
    assert sampled <= gauges.tokens <= sampled + ends  # the end of text may count
    assert gauges.steps > 0
    assert gauges.steps <= gauges.step_slots <= gauges.steps * SLOTS
    assert gauges.encode_s >= 0
    assert gauges.decode_s >= 0


def test_closing_drops_what_runs(open_runtime, job):
    runtime = open_runtime()
    for id in range(SLOTS + 2):
        runtime.submit(job(id, max_tokens=40))
    runtime.poll(0.0)
    runtime.close()
    runtime.close()
    assert (runtime.gauges().busy_slots, runtime.gauges().queued) == (0, 0)


def test_audio_becomes_text_through_the_whole_path(engine):
    """Random weights say nothing of sense, but every stage runs, and twice the same."""
    config = Config(
        engine=str(engine.path),
        runtime=RuntimeConfig(slots=SLOTS, encoder_batch=2, threads=1),
        transcriber=TranscriberConfig(max_tokens=8, temperatures=(0.0, 0.5)),
    )
    samples = torch.randn(40 * SAMPLE_RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    request = Request(samples.numpy(), sample_rate=SAMPLE_RATE)
    with open_transcriber(config) as transcriber:
        first, second = transcriber.transcribe(request), transcriber.transcribe(request)
        assert transcriber.healthy
    assert (first.text, first.language) == (second.text, second.language)
    assert first.language in LANGUAGE_NAMES
    assert first.duration == 40.0
    assert first.segments == second.segments
    assert first.timings.encode_s > 0
    assert first.timings.decode_s > 0
    stats = transcriber.stats()
    assert (stats.ok, stats.audio_s) == (3, 81.0)
    assert stats.windows >= 5
