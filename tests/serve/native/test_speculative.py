"""Drafting: answers do not change, steps are saved, and the quicker way is taken."""

import dataclasses

import pytest
import torch

from build.checkpoint import Network
from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.manifest import CheckpointSource
from serve.native.graphs import Snapshot
from serve.native.runtime import NativeRuntime
from serve.native.speculative import KEEP_STEPS, TRIAL_STEPS, SpeculationPolicy, SpeculativeLoop
from serve.runtime.protocol import DecodingOptions, Job
from tests.checkpoints import write_engine
from tests.marks import nightly
from tests.serve.native.decoding import beginnings, ends, prompt_of, run

MOST = 4
CONFIG = RuntimeConfig(slots=4, encoder_batch=4, threads=1, draft_tokens=MOST)


def first_and_last_layer(checkpoint):
    """A poor draft: the decoder without the layers between the first and the last."""
    last = checkpoint.dims.n_text_layer - 1
    kept = {
        name.replace(f"decoder.layers.{last}.", "decoder.layers.1."): tensor.clone()
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith("decoder.layers.")
        or name.startswith(("decoder.layers.0.", f"decoder.layers.{last}."))
    }
    return kept, dataclasses.replace(checkpoint.dims, n_text_layer=2)


def whole(checkpoint):
    """A perfect draft: the decoder itself."""
    return {name: t.clone() for name, t in checkpoint.tensors.items()}, checkpoint.dims


def write_drafted(checkpoint, kind, folder):
    """An engine of a checkpoint with the draft that `kind` makes of it."""
    tensors, dims = kind(checkpoint)
    draft = Network(checkpoint.path, "hf", dims, tensors, CheckpointSource("a test", "0" * 64), 0)
    return write_engine(dataclasses.replace(checkpoint, draft=draft), folder, "fp16")


@pytest.fixture(scope="module")
def engine_with(checkpoint, tmp_path_factory):
    """Engines of the demo checkpoint, by what makes their draft."""
    made = {}

    def write(kind):
        if kind not in made:
            made[kind] = write_drafted(
                checkpoint, kind, tmp_path_factory.mktemp("draft") / "engine"
            )
        return made[kind]

    return write


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(SpeculationPolicy, "should_draft", lambda self, busy: True)


@pytest.fixture(scope="module")
def jobs(checkpoint, windows):
    """Windows of several clips, the language asked for in one, some ended early."""
    facts, made = checkpoint.facts, []
    for i, (_, language, features) in enumerate(beginnings(windows)[:7]):
        prompt = prompt_of(facts, language)
        if i == 1:
            prompt = (facts.sot, DETECT_LANGUAGE, facts.transcribe)
        made.append(
            Job(i, features, prompt, DecodingOptions(max_tokens=(200, 200, 1, 2, 7)[i % 5]))
        )
    return made


@pytest.fixture(scope="module")
def expected(engine_with, jobs):
    runtime = NativeRuntime(engine_with(whole), dataclasses.replace(CONFIG, draft_tokens=0))
    ended = run(runtime, jobs)
    assert runtime.gauges().drafted == runtime.gauges().drafted_right == 0
    return ended, runtime.gauges().steps


@pytest.mark.parametrize("kind", [whole, *nightly(first_and_last_layer)])
def test_the_answer_is_that_of_single_steps_whatever_the_draft_is_worth(
    kind, engine_with, jobs, expected, always
):
    runtime = NativeRuntime(engine_with(kind), CONFIG)
    ended = run(runtime, jobs)
    for job_id, event in expected[0].items():
        found = ended[job_id]
        assert (found.tokens, found.finished) == (event.tokens, event.finished)
        same = dataclasses.replace(found.scores, encode_s=0.0, decode_s=0.0)
        for name, value in dataclasses.asdict(event.scores).items():
            if not name.endswith("_s"):
                assert getattr(same, name) == pytest.approx(value, abs=1e-4)
    gauges = runtime.gauges()
    assert 0 < gauges.drafted_right < gauges.drafted
    if kind is whole:  # the rules alone differ from its guesses
        assert gauges.drafted_right > 0.6 * gauges.drafted
        assert gauges.steps < 0.5 * expected[1]
    else:
        assert gauges.drafted_right < 0.5 * gauges.drafted


@pytest.mark.nightly
def test_rows_that_sample_or_search_are_not_drafted_for(engine_with, jobs, always):
    config = dataclasses.replace(CONFIG, rows=6)
    for options in (DecodingOptions(temperature=0.8, seed=3), DecodingOptions(beam_size=2)):
        options = dataclasses.replace(options, max_tokens=12)
        some = [dataclasses.replace(job, options=options) for job in jobs[:2]]
        assert gauges_where_drafts_change_nothing(engine_with(whole), config, some).drafted == 0


def gauges_where_drafts_change_nothing(engine, config, jobs):
    drafting = NativeRuntime(engine, config)
    plain = NativeRuntime(engine, dataclasses.replace(config, draft_tokens=0))
    found, expected = ([e.tokens for e in run(each, jobs).values()] for each in (drafting, plain))
    assert found == expected
    return drafting.gauges()


@pytest.mark.nightly
def test_a_draft_that_begins_late_knows_all_that_was_said(engine_with, jobs, monkeypatch):
    """Its caches are filled with what was decoded without it."""
    turns = iter(range(10_000))
    monkeypatch.setattr(SpeculationPolicy, "should_draft", lambda self, busy: next(turns) >= 10)
    runtime = NativeRuntime(engine_with(whole), CONFIG)
    run(runtime, [job for job in jobs if job.options.max_tokens == 200])
    assert runtime.gauges().drafted_right > 0.6 * runtime.gauges().drafted > 0


@pytest.mark.nightly
def test_guesses_go_on_where_they_were_when_urgent_windows_have_passed(
    engine_with, jobs, expected, always
):
    runtime = NativeRuntime(engine_with(whole), CONFIG)
    rested, ended = 0, {}
    long = [dataclasses.replace(job, id=job.id + more) for job in jobs[5:] for more in (0, 100)]
    assert len(long) == CONFIG.slots
    for job in long:
        runtime.submit(job)
    assert not ends(runtime)
    for job in jobs[:5]:
        runtime.submit(dataclasses.replace(job, urgent=True))
    while len(ended) < len(long) + 5:
        busy, before = runtime.gauges().busy_slots, runtime.gauges().step_slots
        ended |= {event.job_id: event.tokens for event in ends(runtime)}
        rested += runtime.gauges().step_slots - before < busy
    assert rested > 0
    assert ended == {id: expected[0][id % 100].tokens for id in ended}
    assert runtime.gauges().drafted_right > 0.6 * runtime.gauges().drafted


def test_an_engine_without_a_draft_decodes_as_ever(engine, engine_with, jobs):
    runtime = NativeRuntime(engine, CONFIG)
    run(runtime, jobs[2:4])
    assert runtime.gauges().drafted == 0
    assert "draft" not in runtime.description
    described = NativeRuntime(engine_with(whole), CONFIG).description
    assert "SpeculativeLoop, drafts of up to 4 tokens" in described


class GraphSteps(SpeculativeLoop):
    """Takes the steps that a CUDA graph would record: of the first rows, whether free or not."""

    def launch(self, slots):
        owners = slots.owners()
        table = torch.zeros((3, slots.slots), dtype=torch.int64)
        for i, (place, _) in enumerate(owners):
            table[:, i] = torch.tensor((place.slot, place.first_row, 1))
        length = self._state.tokens.shape[1]
        self._step.run(self._step.layout_of(range(slots.row_end)), table, length)
        self._snapshot = Snapshot(self._state, owners)
        return 1


@pytest.mark.nightly
def test_steps_of_a_graph_have_the_same_answers(engine_with, jobs, expected):
    runtime = NativeRuntime(engine_with(whole), CONFIG)
    loop = runtime._loop
    loop.__class__ = GraphSteps
    runtime._scheduler._prefill._draft = loop._decoder, loop._draft_cache
    ended = run(runtime, jobs)
    for job_id, event in expected[0].items():
        assert (ended[job_id].tokens, ended[job_id].finished) == (event.tokens, event.finished)
    assert runtime.gauges().steps < 0.5 * expected[1]


@pytest.mark.nightly
def test_drafts_end_with_the_context_and_leave_samples_alone(engine_with, jobs, always):
    sampled = DecodingOptions(temperature=0.8, seed=3, max_tokens=20)
    cut = DecodingOptions(max_tokens=400)  # up to the end of the context
    some = [dataclasses.replace(job, options=sampled) for job in jobs[:2]]
    some += [dataclasses.replace(jobs[2], id=jobs[2].id + 50, options=cut)]
    gauges = gauges_where_drafts_change_nothing(engine_with(whole), CONFIG, some)
    assert 0 < gauges.drafted_right < gauges.drafted


def turns(pace, busy, count, seconds, tokens):
    """Take turns; how many of them were drafted. `seconds` and `tokens`: (plain, drafted)."""
    drafted = 0
    for _ in range(count):
        way = pace.should_draft(busy)
        drafted += way
        pace.record(busy, seconds[way], tokens if way else 1.0)
    return drafted


def test_both_ways_are_measured_and_the_quicker_one_is_kept():
    pace = SpeculationPolicy()
    assert turns(pace, 1, 2 * TRIAL_STEPS, (1.0, 2.0), 3.0) == TRIAL_STEPS
    assert turns(pace, 1, KEEP_STEPS, (1.0, 2.0), 3.0) == KEEP_STEPS
    # Tried again, and slower now.
    assert turns(pace, 1, 2 * TRIAL_STEPS, (1.0, 2.0), 1.5) == TRIAL_STEPS
    assert turns(pace, 1, KEEP_STEPS, (1.0, 2.0), 1.5) == 0
    assert turns(pace, 1, 2 * TRIAL_STEPS, (1.0, 2.0), 1.5) == TRIAL_STEPS


def test_numbers_of_windows_are_measured_apart():
    pace = SpeculationPolicy()
    turns(pace, 1, 2 * TRIAL_STEPS, (1.0, 2.0), 3.0)
    turns(pace, 8, 2 * TRIAL_STEPS, (1.0, 4.0), 3.0)
    assert pace.should_draft(1) and not pace.should_draft(8)
    assert not pace.should_draft(15) and pace.should_draft(16)  # about as many; not measured yet


def test_what_was_found_is_logged(caplog):
    with caplog.at_level("INFO", "serve.native.speculative"):
        turns(SpeculationPolicy(), 5, 2 * TRIAL_STEPS, (0.003, 0.004), 2.0)
    assert caplog.messages == [
        "speculative decoding is on for about 5 windows: 2.00 ms a token with it, 3.00 without; "
        f"the next measurement follows after {KEEP_STEPS} steps"
    ]
