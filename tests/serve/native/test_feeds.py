"""Short prompts of one window by a step of fixed shape, with a graph that only runs its work."""

import dataclasses

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.native import replay
from serve.native.feeds import FEEDS, ShortPrompt, Span
from serve.native.runtime import NativeRuntime
from serve.native.slots import Place
from serve.runtime.protocol import DecodingOptions, Job
from tests.serve.native.decoding import prompt_of, run


class Graph:
    """A captured piece of work, run again by a replay; counts them."""

    def __init__(self, work, pool, stream):
        work()
        self._work, self.replays = work, 0

    def replay(self):
        self.replays += 1
        self._work()


@pytest.mark.parametrize(
    ("spans", "wanted", "fits"),
    [
        ([(0, 4)], [0, 3], True),
        ([(0, 1)], [0], True),
        ([(2, 5)], [2], True),
        ([(0, 5)], [4], False),
        ([(0, 4)], [0, 1, 3], False),
        ([(0, 2), (2, 4)], [3], False),
    ],
)
def test_up_to_four_tokens_of_one_window_fit(spans, wanted, fits):
    spans = [Span(Place(1, 2, 1), begin, end) for begin, end in spans]
    assert ShortPrompt.holds(spans, wanted) == fits


def test_a_shorter_prompt_is_filled_up_with_its_last_token():
    prompt = ShortPrompt(torch.zeros((8, 16), dtype=torch.int64))
    prompt.write(Span(Place(3, 6, 2), 1, 4), [2])
    feed = prompt.feed
    assert feed.rows.tolist() == [6] * 4
    assert feed.positions.tolist() == [1, 2, 3, 3]
    assert feed.groups.runs == [(3, 1, 0, 4)]
    assert prompt.wanted.tolist() == [2, 2]


def test_answers_are_those_of_prompts_that_are_launched(engine, checkpoint, windows, monkeypatch):
    monkeypatch.setattr(replay, "capture", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    facts, jobs = checkpoint.facts, []
    for i, (_, language, features) in enumerate(windows[:6]):
        prompt = prompt_of(facts, language)
        prompt = [prompt, (*prompt, facts.no_timestamps), (prompt[0], DETECT_LANGUAGE, prompt[2])][
            i % 3
        ]
        options = DecodingOptions(max_tokens=12, timestamps=facts.no_timestamps not in prompt)
        jobs.append(Job(i, features, prompt, options))
    jobs[5] = dataclasses.replace(jobs[5], prompt=(facts.sot_prev, 400, 401, 402, *jobs[5].prompt))
    runtime = NativeRuntime(engine, RuntimeConfig(slots=2, encoder_batch=1))
    expected = {job.id: run(runtime, [job])[job.id] for job in jobs}
    starter = runtime._intake._starter
    with torch.inference_mode():
        starter.replay.add(FEEDS, starter._feed_short)
        starter.replay.record(None)
    for job in jobs:
        found, plain = run(runtime, [job])[job.id], expected[job.id]
        assert (found.tokens, found.scores.language) == (plain.tokens, plain.scores.language)
        assert found.scores.no_speech_prob == pytest.approx(plain.scores.no_speech_prob, abs=1e-5)
        assert found.scores.avg_logprob == pytest.approx(plain.scores.avg_logprob, abs=1e-4)
    assert (
        starter.replay._graphs[FEEDS].replays == 4 + 2 + 1
    )  # found languages take two; the last, one
