"""Several rows a slot, through the runtime: beams, samples, drafts and prompts."""

import dataclasses

import pytest
import torch

from serve.native.kernels.choose import choose
from serve.native.network import Whisper
from serve.runtime.protocol import DecodingOptions, Job
from tests.marks import nightly
from tests.serve.native.decoding import beginnings, prompt_of, run

CPU = torch.device("cpu")
PLAIN = DecodingOptions(timestamps=False, max_tokens=40)
BEAM = dataclasses.replace(PLAIN, beam_size=5)
SAMPLES = dataclasses.replace(PLAIN, temperature=0.8, best_of=4, seed=7)


@pytest.fixture(scope="module")
def network(engine):
    """In the runtime's arithmetic."""
    dims = engine.manifest.dims
    return Whisper(dims, engine.load_weights(), CPU, choose("auto", CPU, dims, 12))


@pytest.fixture(scope="module")
def some(windows):
    """Five windows, of both languages, one of noise; of the first, beams say more."""
    chosen = ("en_long.mp3", "es_question.wav", "en_question.wav", "noise.flac", "en_thanks.flac")
    return [next(window for window in windows if window[0] == name) for name in chosen]


def jobs_of(facts, some, *options):
    """A job a window; the options take turns."""
    return [
        Job(i, window[2], prompt_of(facts, window[1]), options[i % len(options)])
        for i, window in enumerate(some)
    ]


@pytest.mark.nightly
def test_a_blank_takes_its_share_of_the_first_choice_where_it_may_be_said(engine, runtime, some):
    facts = engine.manifest.tokenizer
    _, language, features = some[0]
    prompt = (*prompt_of(facts, language), facts.no_timestamps)
    plain = dataclasses.replace(PLAIN, max_tokens=3)
    both = (plain, dataclasses.replace(plain, suppress_blank=False))
    ended = run(runtime, [Job(i, features, prompt, options) for i, options in enumerate(both)])
    assert ended[0].tokens == ended[1].tokens
    assert ended[1].scores.avg_logprob < ended[0].scores.avg_logprob - 1e-3


def logprob_sum(engine, network, job, event):
    """What the network gives the job's answer when it is fed nothing else; without timestamps."""
    facts = engine.manifest.tokenizer
    answer = [*event.tokens, facts.eot] if event.finished == "eot" else list(event.tokens)
    tokens = torch.tensor([[*job.prompt, *answer]])
    logits = network.teacher_forced_logits(job.features[None], tokens)[0]
    logits = logits[len(job.prompt) - 1 : -1].clone()
    logits[:, list(facts.suppress_tokens)] = -torch.inf
    logits[0, list(facts.begin_suppress_tokens)] = -torch.inf
    return float(logits.log_softmax(-1)[torch.arange(len(answer)), answer].sum()), len(answer)


@pytest.mark.parametrize(
    "options", [BEAM, *nightly(PLAIN, SAMPLES)], ids=["beam", "greedy", "samples"]
)
def test_an_answer_has_the_score_that_the_network_gives_it_alone(
    engine, network, runtime, some, options
):
    jobs = jobs_of(engine.manifest.tokenizer, some[1:3], options)
    ended = run(runtime, jobs)
    for job in jobs:
        event = ended[job.id]
        total, length = logprob_sum(engine, network, job, event)
        assert event.scores.avg_logprob == pytest.approx(total / length, abs=1e-4)


@pytest.mark.nightly
def test_the_best_sample_is_kept(engine, runtime, some):
    facts = engine.manifest.tokenizer
    one = dataclasses.replace(SAMPLES, best_of=1)
    job = jobs_of(facts, some, SAMPLES)[4]
    several = run(runtime, [job])[job.id]
    first = run(runtime, [dataclasses.replace(job, options=one)])[job.id]
    assert several.scores.avg_logprob > first.scores.avg_logprob - 1e-6
    again = run(runtime, [job])[job.id]
    assert again.tokens == several.tokens


def test_a_right_draft_saves_steps(engine, runtime, some):
    facts = engine.manifest.tokenizer
    jobs = jobs_of(facts, beginnings(some[1:3]), dataclasses.replace(PLAIN, timestamps=True))
    begun = runtime.gauges().steps
    plain = run(runtime, jobs)
    steps = runtime.gauges().steps - begun
    run(runtime, [dataclasses.replace(job, draft=plain[job.id].tokens) for job in jobs])
    assert runtime.gauges().steps - begun - steps < steps / 3
