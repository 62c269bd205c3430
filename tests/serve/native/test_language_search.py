"""Languages of windows: among candidates, and several tried where it is unsure which it is."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.native.language_search import best_hypothesis, next_language_job, score_language
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Detection, Job, JobEvent, Scores
from tests.marks import nightly
from tests.serve.native.decoding import beginnings, ends, run

CONFIG = RuntimeConfig(slots=3, rows=9, encoder_batch=2, threads=1)
ALL = Detection(certainty=1.0, max_languages=3)


@pytest.fixture(scope="module")
def windows(windows):
    return beginnings(windows)


@pytest.fixture(scope="module")
def prompt(checkpoint):
    return checkpoint.facts.sot, DETECT_LANGUAGE, checkpoint.facts.transcribe


def job_of(windows, prompt, i, **fields):
    return Job(i, windows[i][2], prompt, **fields)


def heard(event):
    return event.scores.language


def test_only_candidates_are_detected(runtime, windows, prompt, checkpoint):
    languages = checkpoint.facts.languages
    some = tuple(languages[code] for code in ("fr", "de", "it"))
    jobs = [
        job_of(windows, prompt, 0),
        job_of(windows, prompt, 1, detection=Detection(some)),
        job_of(windows, prompt, 2, detection=Detection(some[:1])),
    ]
    ended = run(runtime, jobs)
    assert heard(ended[0]) == languages[windows[0][1]]
    assert heard(ended[1]) in some
    assert (heard(ended[2]), ended[2].scores.language_prob) == (some[0], pytest.approx(1.0))


def in_order(runtime, job, known):
    """The likeliest languages of a window, their probabilities, and what is said in each."""
    found, left = [], 1.0
    for _ in range(3):
        languages = [language for language, _, _ in found]
        others = tuple(x for x in known if x not in languages)
        event = run(runtime, [dataclasses.replace(job, detection=Detection(others))])[job.id]
        prob = left * event.scores.language_prob
        found.append((event.scores.language, prob, event))
        left -= prob
    return found


def joint(prob, event):
    length = len(event.tokens) + (event.finished == "eot")
    return math.log(prob) + event.scores.avg_logprob * length


@pytest.mark.nightly
@pytest.mark.parametrize("beam_size", [1, *nightly(2)])
def test_the_likeliest_text_stays_with_its_language_counted_in(
    runtime, windows, prompt, checkpoint, beam_size
):
    options = DecodingOptions(beam_size=beam_size, max_tokens=40)
    jobs = [job_of(windows, prompt, i, options=options, align_frames=100) for i in range(2)]
    known = checkpoint.facts.languages.values()
    each = {job.id: in_order(runtime, job, known) for job in jobs}
    tried = run(runtime, [dataclasses.replace(job, detection=ALL) for job in jobs])
    for job in jobs:
        ended = [found for found in each[job.id] if found[2].finished == "eot"] or each[job.id]
        language, prob, event = max(ended, key=lambda found: joint(found[1], found[2]))
        answer = tried[job.id]
        assert (answer.tokens, heard(answer)) == (event.tokens, language)
        assert answer.scores.language_prob == pytest.approx(prob, abs=1e-4)
        assert answer.scores.avg_logprob == pytest.approx(event.scores.avg_logprob, abs=1e-4)
        assert answer.alignment.token_probs == pytest.approx(event.alignment.token_probs, abs=1e-3)


def test_a_window_that_is_sure_costs_nothing_more(runtime, windows, prompt):
    plain = job_of(windows, prompt, 0)
    before = runtime.gauges()
    event = run(runtime, [plain])[0]
    between = runtime.gauges()
    sure = Detection(certainty=event.scores.language_prob - 0.01, max_languages=3)
    again = run(runtime, [dataclasses.replace(plain, detection=sure)])[0]
    after = runtime.gauges()
    assert again.tokens == event.tokens
    for name in ("tokens", "steps", "windows"):
        spent = [getattr(g, name) for g in (before, between, after)]
        assert spent[2] - spent[1] == spent[1] - spent[0], name


def test_a_named_language_is_not_doubted(runtime, windows, prompt, checkpoint):
    named = (prompt[0], checkpoint.facts.languages["es"], prompt[2])
    jobs = [job_of(windows, named, 0), job_of(windows, named, 1, detection=ALL)]
    tokens = runtime.gauges().tokens
    ended = run(runtime, jobs)
    assert heard(ended[1]) is None
    assert runtime.gauges().tokens - tokens == sum(len(e.tokens) + 1 for e in ended.values())


@pytest.mark.nightly
def test_a_window_that_tries_another_language_can_be_cancelled(engine, windows, prompt):
    runtime, polls = NativeRuntime(engine, CONFIG), 1
    runtime.submit(job_of(windows, prompt, 0))
    while not ends(runtime):
        polls += 1
    runtime.submit(job_of(windows, prompt, 0, detection=ALL))
    for _ in range(polls + 1):  # the first try has ended
        assert not ends(runtime)
    runtime.cancel(0)
    assert ends(runtime) == [JobEvent(0, finished="cancelled")]
    assert runtime.gauges().busy_slots == 0
    run(runtime, [job_of(windows, prompt, i) for i in range(CONFIG.slots)])
    runtime.close()


def test_a_window_is_decoded_in_its_own_language_if_that_is_likely(
    runtime, windows, prompt, checkpoint
):
    detected = run(runtime, [job_of(windows, prompt, 0, align_frames=100)])[0]
    own, prob = heard(detected), detected.scores.language_prob
    other = next(x for x in checkpoint.facts.languages.values() if x != own)
    named = (prompt[0], other, prompt[2])
    clear, unclear = Detection(switch=prob - 0.01), Detection(switch=prob + 0.01)
    kin = dataclasses.replace(clear, close_languages=(frozenset({own, other}),))
    jobs = [
        job_of(windows, named, 0, detection=clear, align_frames=100),
        dataclasses.replace(job_of(windows, named, 0, detection=unclear), id=1),
        dataclasses.replace(job_of(windows, named, 0), id=2),
        dataclasses.replace(job_of(windows, named, 0, detection=kin), id=3),
    ]
    encoded = runtime.gauges().windows
    ended = run(runtime, jobs)
    switched, stayed, plain, close = (ended[i] for i in range(4))
    assert runtime.gauges().windows - encoded == 4
    assert (switched.tokens, heard(switched)) == (detected.tokens, own)
    assert switched.scores.language_prob == pytest.approx(prob, abs=1e-4)
    expected = pytest.approx(detected.alignment.token_probs, abs=1e-3)
    assert switched.alignment.token_probs == expected
    for event in (stayed, plain, close):
        assert (event.tokens, heard(event)) == (plain.tokens, None)
        assert event.scores.top_language == (own, pytest.approx(prob, abs=1e-4))


FACTS = SimpleNamespace(sot=1, translate=2, transcribe=3, languages={"en": 10, "es": 11, "ja": 12})


def event_of(finished, language, prob):
    return JobEvent(7, (1, 2), finished, Scores(-0.5, 0.1, language, prob, 1.0, 2.0))


def tried(job, event, logprob, before=()):
    return (*before, score_language(job, event, logprob, before, FACTS))


def test_text_that_was_cut_short_is_worse_than_any_that_ended():
    job = Job(7, None, (1, DETECT_LANGUAGE, 3))
    loop = tried(job, event_of("loop", 10, 0.6), -1.0)
    both = tried(job, event_of("eot", 11, 0.5), -30.0, loop)
    assert both[1].prob == pytest.approx(0.2)
    assert best_hypothesis(both, FACTS).language == 11


def test_tries_end_where_no_language_is_left():
    detection = Detection((10, 11), 1.0, 5)
    job = Job(7, None, (1, DETECT_LANGUAGE, 3), detection=detection, draft=(3,))
    first = tried(job, event_of("eot", 10, 0.6), -1.0)
    again = next_language_job(job, first, FACTS, -1)
    assert (again.id, again.detection.languages, again.draft) == (-1, (11,), ())
    both = tried(again, event_of("eot", 11, 1.0), -1.0, first)
    assert next_language_job(job, both, FACTS, -2) is None


def test_a_likely_english_text_does_not_decide_the_language():
    """An invented one in the likeliest language; the transcripts say that it is another."""
    prompt = (1, DETECT_LANGUAGE, 2, 20, 21)
    job = Job(7, None, prompt, prefix=2, detection=Detection((), 0.85, 2))
    tries = tried(job, event_of("eot", 12, 0.5), -1.0)
    hypothesis = next_language_job(job, tries, FACTS, -1)
    assert (hypothesis.prompt, hypothesis.prefix) == ((1, DETECT_LANGUAGE, 3), 0)
    tries = tried(hypothesis, event_of("eot", 12, 0.5), -90.0, tries)
    hypothesis = next_language_job(job, tries, FACTS, -2)
    assert hypothesis.detection.languages == (10, 11)
    tries = tried(hypothesis, event_of("eot", 11, 0.8), -9.0, tries)
    again = next_language_job(job, tries, FACTS, -3)
    assert (again.prompt, again.prefix, again.detection.languages) == (prompt, 2, (11,))
    tries = tried(again, event_of("eot", 11, 1.0), -200.0, tries)
    assert next_language_job(job, tries, FACTS, -4) is None
    answer = best_hypothesis(tries, FACTS)
    assert (answer.job, answer.language, answer.logprob) == (again, 11, -200.0)
    assert answer.event.scores.language_prob == pytest.approx(0.4)


def named_event(language, prob):
    """The end of a window with a language in its prompt, heard in another one."""
    event = event_of("eot", None, None)
    scores = dataclasses.replace(event.scores, top_language=(language, prob))
    return dataclasses.replace(event, scores=scores)


@pytest.mark.parametrize(("own", "language"), [(-80.0, 11), (-95.0, None)])
def test_the_likelier_text_of_a_named_and_of_the_own_language_stays(own, language):
    detection = Detection((), 0.85, 2, 0.5)
    job = Job(7, None, (1, 10, 3), detection=detection, draft=(3,))
    tries = tried(job, named_event(11, 0.9), -90.0)
    again = next_language_job(job, tries, FACTS, -1)
    assert (again.prompt, again.draft) == ((1, DETECT_LANGUAGE, 3), ())
    tries = tried(again, event_of("eot", 11, 0.9), own, tries)
    assert next_language_job(job, tries, FACTS, -2) is None
    answer = best_hypothesis(tries, FACTS).event.scores
    assert (answer.language, answer.top_language) == (language, None)
    translated = tried(dataclasses.replace(job, prompt=(1, 10, 2)), named_event(11, 0.9), -90.0)
    again = next_language_job(translated[0].job, translated, FACTS, -1)
    tries = tried(again, event_of("eot", 11, 0.9), own, translated)
    assert next_language_job(translated[0].job, tries, FACTS, -2) is None
    assert best_hypothesis(tries, FACTS).language == 11, "its text says nothing of the language"


def test_an_unsure_own_language_is_told_by_its_text():
    job = Job(7, None, (1, 10, 3), detection=Detection((), 0.85, 2, 0.5))
    tries = tried(job, named_event(12, 0.6), -90.0)
    tries = tried(next_language_job(job, tries, FACTS, -1), event_of("eot", 12, 0.6), -80.0, tries)
    again = next_language_job(job, tries, FACTS, -2)
    assert again.detection.languages == (11,), "but for the one that was named and was tried"
    tries = tried(again, event_of("eot", 11, 1.0), -40.0, tries)
    assert next_language_job(job, tries, FACTS, -3) is None
    assert best_hypothesis(tries, FACTS).language == 11


def test_a_language_that_the_transcripts_confirm_is_translated_once():
    job = Job(7, None, (1, DETECT_LANGUAGE, 2), detection=Detection((), 0.85, 2))
    tries = tried(job, event_of("eot", 12, 0.5), -90.0)
    tries = tried(next_language_job(job, tries, FACTS, -1), event_of("eot", 12, 0.5), -5.0, tries)
    tries = tried(next_language_job(job, tries, FACTS, -2), event_of("eot", 11, 0.8), -9.0, tries)
    assert next_language_job(job, tries, FACTS, -3) is None
    assert best_hypothesis(tries, FACTS).job is job
