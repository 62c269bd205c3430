"""What a window's text attended to: against the definition on transformers' attentions."""

import dataclasses

import pytest
import torch
import transformers

from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.native.alignment import Aligner, EndedWindow, smoothed
from serve.native.forced import MAX_PASS_WINDOWS
from serve.native.network import Whisper
from serve.native.runtime import NativeRuntime
from serve.native.slots import SlotAllocation
from serve.runtime.protocol import DecodingOptions, Job, JobEvent
from serve.speech.tokenizer import Tokenizer
from tests.marks import nightly
from tests.serve.native.decoding import prompt_of, run

CONFIG = RuntimeConfig(slots=4, rows=12, encoder_batch=2, threads=1)
OPTIONS = (
    DecodingOptions(),
    DecodingOptions(beam_size=3),
    DecodingOptions(temperature=0.8, best_of=2, seed=3),
)
WINDOWS = (  # what is decoded, of how many frames, and how
    ("en_question.wav", 150, OPTIONS[0]),
    ("es_question.wav", 131, OPTIONS[1]),
    ("en_question.wav", 90, OPTIONS[2]),
    ("en_long.mp3", 1500, OPTIONS[0]),
)


def plain(scores, frames):
    """OpenAI's definition for one window: (heads, tokens, all frames) -> (tokens, frames)."""
    weights = scores[:, :, :frames].softmax(dim=-1)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = (weights - mean) / deviation
    if frames > 3:
        weights = torch.nn.functional.pad(weights, (3, 3), mode="reflect")
        weights = weights.unfold(-1, 7, 1).sort()[0][..., 3]
    return weights.mean(dim=0)


def test_windows_of_any_length_are_smoothed_together_as_each_alone():
    generator = torch.Generator().manual_seed(1)
    sizes = [(5, 40), (9, 61), (2, 3), (9, 4), (3, 1)]
    scores = torch.randn(len(sizes), 3, 9, 61, generator=generator) * 4
    for one, (tokens, _) in zip(scores, sizes, strict=True):
        one[:, tokens:] = one[:, tokens - 1 : tokens]
    columns = (torch.tensor(column) for column in zip(*sizes, strict=True))
    found = smoothed(scores, *columns).mean(dim=1)
    for one, mine, (tokens, frames) in zip(scores, found, sizes, strict=True):
        expected = plain(one[:, :tokens], frames)
        if frames == 1:
            expected = torch.zeros(tokens, 1)  # each token's whole weight: no difference, no score
        torch.testing.assert_close(mine[:tokens, :frames], expected, atol=1e-4, rtol=1e-4)


def test_frames_that_nobody_attends_to_tell_nothing():
    scores = torch.zeros(1, 1, 3, 20)
    scores[..., 10:] = -400.0
    scores[0, 0, 1, 4] = 3.0
    found = smoothed(scores, torch.tensor([3]), torch.tensor([20]))
    assert found.isfinite().all() and not found[..., 13:].any()


@pytest.fixture(scope="module")
def runtime(engine):
    runtime = NativeRuntime(engine, CONFIG)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def reference():
    """The checkpoint in transformers, which shows its attentions."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        "tests/fixture/checkpoint", attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def jobs(checkpoint, engine, windows):
    """Every length and way of decoding, known languages and unknown, earlier text, a prefix."""
    facts, found = checkpoint.facts, []
    for name, frames, options in WINDOWS:
        _, language, features = next(window for window in windows if window[0] == name)
        prompt = prompt_of(facts, language)
        if options.beam_size > 1:
            prompt = (facts.sot_prev, *range(40, 60), facts.sot, DETECT_LANGUAGE, prompt[-1])
        if options.temperature > 0:
            options = dataclasses.replace(options, timestamps=False)
            prompt = (*prompt, facts.no_timestamps)
        found.append(Job(len(found), features, prompt, options, align_frames=frames))
    begun = (facts.timestamp_begin, *Tokenizer(engine).previous_text("Where is the"))
    prompt = (*found[0].prompt, *begun)
    found.append(dataclasses.replace(found[0], id=len(found), prompt=prompt, prefix=len(begun)))
    return found


@torch.inference_mode()
def expected_of(reference, facts, job, event):
    """(token probabilities, matrix) by the definition, from transformers' own forward pass."""
    language = event.scores.language or job.prompt[job.prompt.index(facts.sot) + 1]
    start = [facts.sot, language, facts.transcribe]
    begun = job.prompt[len(job.prompt) - job.prefix :]
    text = [token for token in (*begun, *event.tokens) if token < facts.eot]
    fed = torch.tensor([[*start, facts.no_timestamps, *text, facts.eot]])
    out = reference(job.features[None], decoder_input_ids=fed, output_attentions=True)
    heads = [out.cross_attentions[layer][0, head] for layer, head in facts.alignment_heads]
    rows = slice(len(start), len(start) + len(text) + 1)
    matrix = plain(torch.stack(heads).log(), job.align_frames)[rows]
    probs = out.logits[0, rows, : facts.eot].softmax(dim=-1)[range(len(text)), text]
    return probs[max(0, job.prefix - 1) :], matrix


@pytest.mark.parametrize("chosen", [(1, 4), *nightly(((0, 2, 3),))], ids=str)
def test_it_is_the_definitions_on_transformers_attentions(
    engine, reference, checkpoint, jobs, chosen
):
    runtime = NativeRuntime(engine, dataclasses.replace(CONFIG, compute_type="float32"))
    jobs = [jobs[i] for i in chosen]
    ended = run(runtime, jobs)
    for job in jobs:
        event = ended[job.id]
        found = event.alignment
        assert found.prefix == max(0, job.prefix - 1), "its timestamp is not fed"
        probs, matrix = expected_of(reference, checkpoint.facts, job, event)
        torch.testing.assert_close(torch.from_numpy(found.token_probs), probs, atol=2e-3, rtol=1e-2)
        found = torch.from_numpy(found.matrix)
        assert found.shape == matrix.shape
        # FP16 weights against FP32: z-scores of frames that hardly anyone attends to differ most.
        assert (found - matrix).abs().mean() < 0.01 and (found - matrix).abs().max() < 0.5


@pytest.mark.nightly
def test_company_and_neighbours_change_nothing(runtime, engine, jobs):
    """Nor does asking: what is sampled is the same without, and beside windows that ask."""
    silent = [dataclasses.replace(job, align_frames=0) for job in jobs]
    plain = run(runtime, silent)
    assert all(event.alignment is None for event in plain.values())
    beside = [job if job.id % 2 else silent[job.id] for job in jobs]
    together = run(runtime, jobs)
    for asked, ended in ((jobs, together), (beside, run(runtime, beside))):
        for job_id, event in ended.items():
            assert event.tokens == plain[job_id].tokens
            assert event.scores.avg_logprob == pytest.approx(
                plain[job_id].scores.avg_logprob, abs=1e-5
            )
            assert (event.alignment is None) == (asked[job_id].align_frames == 0)
    for job in jobs[1:3]:
        (alone,) = run(runtime, [job]).values()
        found = torch.from_numpy(together[job.id].alignment.matrix)
        torch.testing.assert_close(
            found, torch.from_numpy(alone.alignment.matrix), atol=0.05, rtol=0
        )


@pytest.mark.nightly
def test_a_text_that_fills_the_context_is_aligned(runtime, engine, jobs):
    """There is no room for the end of text then."""
    facts, context = engine.manifest.tokenizer, engine.manifest.dims.n_text_ctx
    options = DecodingOptions(timestamps=False, max_tokens=context, temperature=1.0, seed=5)
    prompt = (*jobs[0].prompt[:3], facts.no_timestamps)
    options = dataclasses.replace(options, no_repeat_ngram_size=1)
    found = run(runtime, [dataclasses.replace(jobs[0], prompt=prompt, options=options)])[0]
    text = [token for token in found.tokens if token < facts.eot]
    assert found.alignment.matrix.shape == (len(text) + 1, jobs[0].align_frames)


def test_a_window_without_text_has_no_alignment(runtime, jobs):
    job = dataclasses.replace(jobs[0], options=DecodingOptions(max_tokens=1))  # a timestamp alone
    (event,) = run(runtime, [job]).values()
    assert event.finished == "length" and event.alignment is None


@pytest.mark.nightly
def test_int8_keys_are_read_as_what_they_stand_for(engine, runtime, jobs):
    int8 = NativeRuntime(engine, dataclasses.replace(CONFIG, cross_kv="int8"))
    (full,) = run(runtime, jobs[:1]).values()
    (event,) = run(int8, jobs[:1]).values()
    assert event.tokens == full.tokens
    difference = torch.from_numpy(event.alignment.matrix - full.alignment.matrix)
    assert 0 < difference.abs().mean() < 0.1


def ended_windows(engine, job, count):
    """An aligner, and windows that have just ended in its first slots."""
    facts, dims = engine.manifest.tokenizer, engine.manifest.dims
    network = Whisper(dims, engine.load_weights(), torch.device("cpu"))
    aligner = Aligner(network, network.new_cache(count, count), facts, rows=count)
    jobs = (dataclasses.replace(job, id=id) for id in range(count))
    return aligner, [
        EndedWindow(one, SlotAllocation(one.id, one.id, 1), JobEvent(one.id, (7, 8), "eot"))
        for one in jobs
    ]


def test_of_a_window_that_is_dropped_nothing_is_heard(engine, jobs):
    aligner, ended = ended_windows(engine, jobs[0], 3)
    assert aligner.launch(ended) == []
    assert aligner.drop(1) and not aligner.drop(5)
    assert [event.job_id for event in aligner.collect(wait=False)] == [0, 2]
    assert aligner.collect(wait=True) == [] and not aligner.drop(0)
    silent = dataclasses.replace(ended[1], event=JobEvent(1, (), "eot"))
    assert aligner.launch([silent]) == [silent.event]


def test_more_windows_than_a_step_takes_are_aligned_in_several(engine, jobs):
    count = MAX_PASS_WINDOWS + 3
    aligner, ended = ended_windows(engine, jobs[0], count)
    assert aligner.launch(ended) == []
    events = aligner.collect(wait=True)
    assert [event.job_id for event in events] == list(range(count))
    assert all(event.alignment is not None for event in events)


def test_an_engine_without_alignment_heads_says_so(engine):
    facts = dataclasses.replace(engine.manifest.tokenizer, alignment_heads=())
    manifest = dataclasses.replace(engine.manifest, tokenizer=facts)
    runtime = NativeRuntime(dataclasses.replace(engine, manifest=manifest), CONFIG)
    assert not runtime.capabilities.words
