"""Windows with phrases: the same answer in every company and with every draft."""

import itertools

import pytest

from serve.contract.phrases import build_trie
from serve.runtime.protocol import DecodingOptions, Job
from tests.marks import nightly
from tests.serve.native.decoding import beginnings, prompt_of, run


@pytest.fixture(scope="module")
def job_of(windows, checkpoint):
    windows = beginnings(windows)

    def job_of(number, window, draft=(), **options):
        _, language, features = windows[window]
        prompt = prompt_of(checkpoint.facts, language)
        return Job(number, features, prompt, DecodingOptions(max_tokens=40, **options), draft=draft)

    return job_of


@pytest.fixture(scope="module")
def trie(runtime, job_of):
    return pairs_of(run(runtime, [job_of(i, i) for i in range(6)]).values())


def pairs_of(events):
    """Every pair of tokens that some windows say, with which others are led astray."""
    pairs = [pair for event in events for pair in itertools.pairwise(event.tokens)]
    return build_trie([(pair, 5.0) for pair in dict.fromkeys(pairs)])


@pytest.mark.parametrize("beam_size", [1, *nightly(3)])
def test_phrases_change_the_answers_of_those_who_ask_for_them_alone(
    runtime, job_of, trie, beam_size
):
    jobs = [
        job_of(i + more, i, beam_size=beam_size, phrases=phrases)
        for i in range(6, 9)
        for more, phrases in ((0, trie), (100, None))
    ]
    together = {id: event.tokens for id, event in run(runtime, jobs).items()}
    alone = {job.id: run(runtime, [job])[job.id].tokens for job in jobs}
    assert together == alone
    assert any(alone[i] != alone[100 + i] for i in range(6, 9))
