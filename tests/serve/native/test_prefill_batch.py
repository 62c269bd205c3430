"""What starts is fed by steps of fixed shape, with a graph that only runs its work."""

import dataclasses

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.native import replay
from serve.native.batching import TokenSpan
from serve.native.prefill_batch import PrefillBatch, PrefillSize, sizes
from serve.native.rules.state import NO_ROW
from serve.native.runtime import NativeRuntime
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import DecodingOptions, Job
from tests.marks import nightly
from tests.serve.native.decoding import beginnings, prompt_of, run

SHORT = sizes(slots=4)[0]
SEVERAL = PrefillSize(tokens=12, windows=3, n_logits=12)


class Graph:
    """A captured piece of work, run again by a replay; counts them."""

    def __init__(self, work, pool, stream):
        work()
        self._work, self.replays = work, 0

    def replay(self):
        self.replays += 1
        self._work()


def fed(size, spans, wanted):
    prompts = PrefillBatch(torch.zeros((8, 16), dtype=torch.int64), size)
    prompts.write_spans([TokenSpan(place, begin, end) for place, begin, end in spans], wanted)
    return prompts


@pytest.mark.parametrize(
    ("size", "spans", "wanted", "fits"),
    [
        (SHORT, [(0, 4)], [0, 3], True),
        (SHORT, [(0, 5)], [4], False),
        (SHORT, [(0, 4)], [0, 1, 3], False),
        (SEVERAL, [(0, 2)] * 6, list(range(12)), True),
        (SEVERAL, [(0, 1)] * 7, [0], False),
    ],
)
def test_so_many_tokens_of_so_many_windows_fit(size, spans, wanted, fits):
    spans = [TokenSpan(SlotAllocation(1, 2, 1), begin, end) for begin, end in spans]
    prompts = PrefillBatch(torch.zeros((8, 16), dtype=torch.int64), size)
    assert prompts.holds(spans, wanted) == fits


def test_several_are_filled_up_with_the_last_ones_last_token():
    prompts = fed(
        SEVERAL, [(SlotAllocation(3, 6, 1), 0, 4), (SlotAllocation(1, 2, 1), 0, 3)], [3, 6]
    )
    assert prompts.batch.rows.tolist() == [6] * 4 + [2] * 8
    assert prompts.batch.positions.tolist() == [0, 1, 2, 3, 0, 1, *[2] * 6]
    assert prompts.batch.groups.runs == [(3, 1, 0, 4), (1, 1, 4, 8)]
    assert prompts.logit_indices.tolist() == [3] + [6] * 11


def test_rows_that_are_not_there_choose_nothing():
    prompts = fed(SEVERAL, [(SlotAllocation(3, 6, 1), 0, 4)], [3])
    assert SEVERAL.draft_lengths == [0, 8] and prompts.choose([6, 2], [[0, 1], [2, 4], [3, 5]]) == 8
    picks = prompts.picks(8)
    assert len(picks) == 9 and picks[0].rows.tolist() == [6, 2, NO_ROW]
    assert [line.logit_rows.tolist() for line in picks[:3]] == [[0, 1, -1], [2, 4, -1], [3, 5, -1]]
    assert prompts.choose([6], [[0]] * 10) is None  # of nine guesses
    assert prompts.choose([1, 2, 3, 4], [[0] * 4]) is None  # of four windows


@pytest.fixture(scope="module")
def windows(windows):
    return beginnings(windows)


@pytest.fixture
def recorded(monkeypatch):
    """A runtime's prompts are recorded by a function of it, as `Graph`s."""
    monkeypatch.setattr(replay, "capture", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def record(runtime):
        starter = runtime._scheduler._prefill
        with torch.inference_mode():
            starter.add_graphs()
            starter.replay.record(None)
        return starter.replay._graphs

    return record


def test_answers_are_those_of_prompts_that_are_launched(engine, checkpoint, windows, recorded):
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
    graphs = recorded(runtime)
    for job in jobs:
        found, plain = run(runtime, [job])[job.id], expected[job.id]
        assert (found.tokens, found.scores.language) == (plain.tokens, plain.scores.language)
        assert found.scores.no_speech_prob == pytest.approx(plain.scores.no_speech_prob, abs=1e-5)
        assert found.scores.avg_logprob == pytest.approx(plain.scores.avg_logprob, abs=1e-4)
    replays = {
        key.size.tokens: graph.replays
        for key, graph in graphs.items()
        if isinstance(key, PrefillBatch)
    }
    # Found languages take two steps, of which the last job's first is longer.
    assert replays == {4: 4 + 2 + 1, 32: 1, 64: 0, 128: 0, 256: 0, 384: 0}


@pytest.mark.nightly
@pytest.mark.parametrize(("right", "wrong"), [(3, 4), *nightly((0, 9), (6, 0), (20, 1))])
def test_guesses_of_several_windows_are_gone_through_together(
    right, wrong, engine, checkpoint, windows, recorded
):
    """The first window has none. Behind the others' stands what was said there before: the same."""
    facts, jobs = checkpoint.facts, []
    for i, (_, language, features) in enumerate(windows[:4]):
        prompt = (facts.sot, DETECT_LANGUAGE, facts.transcribe) if i % 3 == 2 else None
        options = DecodingOptions(max_tokens=24, no_repeat_ngram_size=3 * (i % 2))
        jobs.append(Job(i, features, prompt or prompt_of(facts, language), options))
    runtime = NativeRuntime(engine, RuntimeConfig(slots=4, encoder_batch=4))
    expected = run(runtime, jobs)
    guessed = []
    for job in jobs:
        said = expected[job.id].tokens
        others = [token + 1 for token in said[right:][: wrong * job.id]]
        draft = (*said[:right], *others) if job.id else ()
        guessed.append(dataclasses.replace(job, id=100 + job.id, draft=draft))
    graphs = recorded(runtime)
    found = run(runtime, guessed)
    for job in jobs:
        event, plain = found[100 + job.id], expected[job.id]
        assert (event.tokens, event.finished) == (plain.tokens, plain.finished)
        assert event.scores.avg_logprob == pytest.approx(plain.scores.avg_logprob, abs=1e-4)
        assert event.scores.language == plain.scores.language
    assert sum(graph.replays for key, graph in graphs.items() if isinstance(key, tuple)) >= 2
