"""What every runtime must do: the same assertions over each implementation of `Runtime`.

A test that is added here reaches all of `tests.runtimes.SUBJECTS` by itself.
"""

import collections
import dataclasses
import random
import time

import pytest

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import OptionError
from tests.runtimes import SLOTS, SUBJECTS, Ended, collect, opener, run


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request, tmp_path_factory, nano_engine):
    """Random weights: what is said depends on everything and means nothing."""
    with request.param(tmp_path_factory, nano_engine) as subject:
        yield subject


@pytest.fixture
def open_runtime(subject):
    """Open a fresh runtime; all are closed at the end."""
    with opener(subject.open) as open_runtime:
        yield open_runtime


@pytest.fixture
def runtime(open_runtime):
    return open_runtime()


@pytest.fixture
def job(subject):
    """Make a job; equal keys have equal audio."""
    return subject.job


@pytest.fixture
def engine(subject):
    return subject.engine


@pytest.fixture
def facts(engine):
    return engine.manifest.tokenizer


def of_subjects(wanted):
    """Run a test for the subjects that have a capability, without parameters to be skipped."""
    chosen = [subject for subject in SUBJECTS if subject.id in wanted]
    return pytest.mark.parametrize("subject", chosen, indirect=True)


ALL = {subject.id for subject in SUBJECTS}
DETECTING = ALL - {"llm_api"}
SAMPLING = ALL - {"llm_api"}
SEARCHING = {
    *("fake", "native-rows", "native-gpu-graphs-rows"),
    *("native-apart-rows", "native-apart-gpu-graphs-rows"),
}


def test_with_nothing_to_do_nothing_happens(runtime):
    assert runtime.poll(0.0) == []
    assert runtime.poll(0.01) == []
    assert (runtime.gauges().busy_slots, runtime.gauges().queued) == (0, 0)


def test_capabilities_fit_the_configuration(runtime, request):
    able, name = runtime.capabilities, request.node.callspec.id
    assert able.max_windows == SLOTS
    assert (able.beam_width > 1) == (name in SEARCHING)
    assert able.detect_language == (name in DETECTING)
    assert able.sampling == (name in SAMPLING)


def test_every_job_ends_once_even_beyond_the_slots(runtime, job, engine, facts):
    ended = run(runtime, [job(id) for id in range(3 * SLOTS + 1)])
    for entry in ended.values():
        assert entry.last.finished in ("eot", "length")
        assert len(entry.tokens) <= 12
        assert facts.eot not in entry.tokens
        assert all(0 <= token < engine.manifest.dims.n_vocab for token in entry.tokens)


def test_it_tells_when_a_job_has_its_slot_if_it_can(runtime, job):
    submitted_s = time.monotonic()
    began_s = [
        entry.began_s for entry in run(runtime, [job(id) for id in range(3 * SLOTS)]).values()
    ]
    if not runtime.capabilities.reports_begin:
        assert set(began_s) == {None}
        return
    assert submitted_s < began_s[0] and began_s == sorted(began_s)
    assert len(set(began_s)) >= 3, "the last ones waited for a slot"


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


def check_loops(runtime, job, facts, **options):
    """Only a loop that is asked for ends early, and it takes nothing back."""
    jobs = [job(id, max_tokens=40, timestamps=False, **options) for id in range(3)]
    whole = run(runtime, jobs)
    mixed = run(runtime, [dataclasses.replace(one, loop_tokens=8 * (one.id != 1)) for one in jobs])
    for id, entry in mixed.items():
        if entry.last.finished != "loop":
            assert entry.result == whole[id].result
            continue
        said = [min(token, facts.timestamp_begin) for token in entry.tokens]
        assert id != 1 and 8 < len(said) < 40
        assert any(said[-p - 9 : -p - 1] == said[-9:-1] for p in range(1, 33))
        assert "beam_size" in options or entry.tokens == whole[id].tokens[: len(said)]


def test_only_a_loop_that_is_asked_for_ends_early(runtime, job, facts):
    check_loops(runtime, job, facts)
    if runtime.capabilities.sampling:
        check_loops(runtime, job, facts, temperature=0.9)


@of_subjects(SEARCHING)
def test_only_a_search_for_which_it_is_asked_ends_at_a_loop(runtime, job, facts):
    check_loops(runtime, job, facts, beam_size=3)


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


def test_options_that_the_runtime_does_not_have_are_refused(runtime, job):
    with pytest.raises(OptionError, match="beam_size"):
        runtime.submit(job(1, beam_size=runtime.capabilities.beam_width + 1))
    options = {"patience": 2.0, "length_penalty": 0.5, "repetition_penalty": 1.5}
    for name, value in {**options, "no_repeat_ngram_size": 2, "suppress_blank": False}.items():
        made = job(1, **{name: value})
        if runtime.capabilities.search_options:
            assert run(runtime, [made])[1].last.finished in ("eot", "length")
        else:
            with pytest.raises(OptionError, match=name):
                runtime.submit(made)


def test_scores_are_probabilities(runtime, job):
    for entry in run(runtime, [job(id) for id in range(4)]).values():
        scores = entry.last.scores
        assert scores.avg_logprob is None or scores.avg_logprob <= 0
        assert scores.no_speech_prob is None or 0 <= scores.no_speech_prob <= 1
        assert scores.encode_s >= 0
        assert scores.decode_s >= 0


@of_subjects(DETECTING)
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


@of_subjects(DETECTING)
def test_naming_the_language_found_changes_nothing(runtime, job, facts):
    codes = {token: code for code, token in facts.languages.items()}
    for id in range(3):
        (found,) = run(runtime, [job(id, key=id, language=None)]).values()
        code = codes[found.last.scores.language]
        (named,) = run(runtime, [job(id + 10, key=id, language=code)]).values()
        assert named.tokens == found.tokens
        if runtime.capabilities.languages:
            language, prob = named.last.scores.top_language
            assert language == found.last.scores.language
            assert prob == pytest.approx(found.last.scores.language_prob, abs=1e-4)


def mixed(job, id, able):
    """Jobs of every sort that the runtime is able to do; equal ids are equal jobs."""
    dice = random.Random(id)
    temperature = dice.choice([0.0, 0.0, 0.8 if able.sampling else 0.0])
    beams = able.beam_sizes or range(1, able.beam_width + 1)
    samples = range(1, 2 if able.beam_sizes else able.beam_width + 1)
    made = job(
        id,
        language=dice.choice([None, "en", "es"] if able.detect_language else ["en", "es"]),
        timestamps=dice.choice([True, False] if able.timestamps else [False]),
        prompt=dice.choice(["", "some words before"] if able.previous_text else [""]),
        temperature=temperature,
        beam_size=1 if temperature else dice.choice(beams),
        best_of=dice.choice(samples) if temperature else 1,
        max_tokens=dice.randrange(1, 30),
        seed=dice.randrange(1000),
    )
    prefix = (7, 8) if able.previous_text and id % 4 == 3 else ()
    prompt = (*made.prompt, *prefix)
    return dataclasses.replace(made, prompt=prompt, prefix=len(prefix), urgent=id % 3 == 0)


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
                ended[event.job_id].add(event)
            if step == steps // 2:
                together.cancel(extra)
        extra += 1
    collect(together, ended, expected)
    assert {id: ended[id].result for id in expected} == expected


@pytest.mark.nightly
def test_a_draft_changes_nothing(open_runtime, job):
    runtime = open_runtime()
    jobs = [mixed(job, id, runtime.capabilities) for id in range(4)]
    expected = {id: ended.result for id, ended in run(runtime, jobs).items()}
    guessing = []
    for each in jobs:
        said = expected[each.id][0]
        another = expected[3 - each.id][0]
        for draft in (said, (*said[: len(said) // 2], 0, 1), another, said * 300):
            id = each.id + 10 * (1 + len(guessing))
            guessing.append(dataclasses.replace(each, id=id, draft=draft))
    for id, ended in run(runtime, guessing).items():
        assert ended.result == expected[id % 10]


@of_subjects(SAMPLING)
def test_sampling_follows_its_seed(runtime, job):
    def sample(id, seed):
        made = job(id, key=5, temperature=1.0, seed=seed, max_tokens=25)
        return run(runtime, [made])[id].tokens

    first = sample(1, seed=3)
    assert sample(2, seed=3) == first
    assert {sample(3 + i, seed=100 + i) for i in range(4)} != {first}


def test_cancelled_jobs_end_once_and_free_their_slots(runtime, job):
    ended = collections.defaultdict(Ended)
    for id in range(2 * SLOTS):
        runtime.submit(job(id, max_tokens=50))
    runtime.cancel(2 * SLOTS - 1)  # waits
    for event in runtime.poll(0.0):  # now others hold slots
        ended[event.job_id].add(event)
    running = [id for id in range(2 * SLOTS - 1) if ended[id].last is None]
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


@of_subjects(SEARCHING)
@pytest.mark.parametrize(
    "options", [{"beam_size": 3}, {"best_of": 3, "temperature": 0.8}], ids=["beam", "samples"]
)
def test_windows_of_several_hypotheses_end_once_and_free_their_rows(runtime, job, options):
    ended = collections.defaultdict(Ended)
    for id in range(3 * SLOTS):
        runtime.submit(job(id, max_tokens=30, **(options if id % 3 else {})))
    for event in runtime.poll(0.0):
        ended[event.job_id].add(event)
    cancelled = {id for id in (1, 2, 3, 3 * SLOTS - 1) if ended[id].last is None}
    for id in cancelled:
        runtime.cancel(id)
    collect(runtime, ended, range(3 * SLOTS))
    assert {id for id in ended if ended[id].last.finished == "cancelled"} == cancelled
    again = run(runtime, [job(id, max_tokens=30, **options) for id in range(SLOTS)])
    for id, entry in again.items():
        assert entry.last.finished in ("eot", "length")
        if id % 3 and id not in cancelled:
            assert entry.result == ended[id].result
        assert entry.last.scores.avg_logprob <= 0
    assert runtime.gauges().busy_slots == 0


def test_gauges_count_the_work(subject, runtime, job):
    ended = run(runtime, [job(id) for id in range(5)])
    gauges = runtime.gauges()
    sampled = sum(len(entry.tokens) for entry in ended.values())
    ends = sum(entry.last.finished == "eot" for entry in ended.values())
    assert gauges.windows == 5
    assert sampled <= gauges.tokens <= sampled + ends  # the end of text may count
    if subject.counts_steps:
        assert gauges.steps > 0
        assert gauges.steps <= gauges.step_slots <= gauges.steps * SLOTS
    else:
        assert (gauges.steps, gauges.step_slots) == (0, 0)
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
