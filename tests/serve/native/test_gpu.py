"""The native runtime on a CUDA device: it says what the CPU says, and the same in any company."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import triton

from eval.random_whisper import published_shape, random_engine
from serve.contract.config import RuntimeConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import UnavailableError
from serve.native.prefill import rows_of
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Detection, Job
from serve.speech.words import monotonic_path
from tests.checkpoints import write_engine
from tests.serve.native.decoding import ends, prompt_of, run
from tests.serve.native.test_phrases import pairs_of
from tests.serve.native.test_speculative import first_and_last_layer, whole, write_drafted

pytestmark = pytest.mark.gpu
CUDA = RuntimeConfig(device="cuda", slots=16, encoder_batch=8)
WAYS = {
    "graphs": dataclasses.replace(CUDA, cuda_graph=True),
    "eager": CUDA,
    "torch": dataclasses.replace(CUDA, kernels="torch"),
}
ROWS = 40  # beside 16 slots: room for several rows a slot
BEAM = DecodingOptions(beam_size=5)
OPTIONS = (
    DecodingOptions(),
    DecodingOptions(temperature=0.8, seed=1),
    BEAM,
    DecodingOptions(beam_size=2, repetition_penalty=1.1, no_repeat_ngram_size=3),
    DecodingOptions(temperature=0.6, best_of=3, seed=2),
)


@pytest.fixture(scope="module")
def int8_engine(checkpoint, tmp_path_factory):
    target = tmp_path_factory.mktemp("engines") / "demo-int8"
    return write_engine(checkpoint, target)


@pytest.fixture(scope="module")
def jobs(checkpoint, windows):
    """A job for each window, with its language named."""
    return [Job(i, w[2], prompt_of(checkpoint.facts, w[1])) for i, w in enumerate(windows)]


def said(engine, config, jobs):
    """What a fresh runtime makes of jobs that it has together: their last events, by id."""
    runtime = NativeRuntime(engine, config)
    ended = run(runtime, jobs)
    runtime.close()
    return ended


@pytest.fixture(scope="module")
def expected(engine, int8_engine, jobs):
    """What the CPU says of each window, by the engine's precision."""
    config = RuntimeConfig(slots=8, encoder_batch=4, compute_type="float32")
    return {"fp16": said(engine, config, jobs), "int8": said(int8_engine, config, jobs)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_same_tokens_as_on_the_cpu(
    precision, way, engine, int8_engine, expected, jobs, windows
):
    ended = said({"fp16": engine, "int8": int8_engine}[precision], WAYS[way], jobs)
    for i, window in enumerate(windows):
        cpu = expected[precision][i]
        assert ended[i].tokens == cpu.tokens, window[0]
        assert ended[i].finished == cpu.finished
        assert ended[i].scores.avg_logprob == pytest.approx(cpu.scores.avg_logprob, abs=2e-2)
        assert ended[i].scores.no_speech_prob == pytest.approx(cpu.scores.no_speech_prob, abs=2e-2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cross_kv", ["full", "int8"])
def test_short_windows_say_what_they_say_on_the_cpu(cross_kv, way, int8_engine, jobs):
    short = [dataclasses.replace(job, features=job.features[:, :1000]) for job in jobs[:8]]
    gpu = said(int8_engine, dataclasses.replace(WAYS[way], cross_kv=cross_kv), short)
    for i, on_cpu in said(int8_engine, RuntimeConfig(slots=8), short).items():
        tolerance = 2e-2 if cross_kv == "full" else 5e-2
        expected = pytest.approx(on_cpu.scores.avg_logprob, abs=tolerance)
        assert gpu[i].scores.avg_logprob == expected
        assert cross_kv == "int8" or gpu[i].tokens == on_cpu.tokens


@pytest.mark.parametrize("way", WAYS)
def test_the_last_of_several_gpus_says_the_same(way, int8_engine, expected, jobs):
    """Where there is one, it is the first."""
    config = dataclasses.replace(WAYS[way], device=f"cuda:{torch.cuda.device_count() - 1}")
    for job_id, event in said(int8_engine, config, jobs[:4]).items():
        assert event.tokens == expected["int8"][job_id].tokens


@pytest.mark.parametrize("way", WAYS)
def test_beams_say_what_they_say_on_the_cpu(way, int8_engine, jobs, windows):
    """Where another answer wins, the two are as good as equal."""
    searches = [dataclasses.replace(job, options=BEAM) for job in jobs]
    # Two threads or one give a CPU the same bits, whatever else the machine does.
    on_cpu = RuntimeConfig(slots=8, rows=ROWS, encoder_batch=4, threads=2)
    cpu = said(int8_engine, on_cpu, searches)
    gpu = said(int8_engine, dataclasses.replace(WAYS[way], rows=ROWS), searches)
    for job_id, event in gpu.items():
        assert event.scores.avg_logprob == pytest.approx(cpu[job_id].scores.avg_logprob, abs=2e-2)
    other = [windows[i][0] for i in gpu if gpu[i].tokens != cpu[i].tokens]
    assert len(other) <= len(windows) // 8, other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beam_size", [1, 5])
def test_phrases_are_said_as_on_the_cpu(beam_size, way, int8_engine, expected, jobs, windows):
    """Beside windows that have none; where another answer wins, the two are as good as equal."""
    trie = pairs_of([expected["int8"][i] for i in range(6)])
    options = [DecodingOptions(beam_size=beam_size, phrases=each) for each in (None, trie)]
    mixed = [dataclasses.replace(job, options=options[job.id % 2]) for job in jobs]
    cpu = said(int8_engine, RuntimeConfig(slots=8, rows=ROWS, encoder_batch=4), mixed)
    gpu = said(int8_engine, dataclasses.replace(WAYS[way], rows=ROWS), mixed)
    other = [windows[i][0] for i in gpu if gpu[i].tokens != cpu[i].tokens]
    assert len(other) <= len(windows) // 10, other
    if beam_size == 1:
        changed = [i for i in gpu if gpu[i].tokens != expected["int8"][i].tokens]
        assert any(i % 2 for i in changed)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1]], ids=["greedy", "sampled"])
def test_a_draft_changes_no_bit(options, graphs, int8_engine, jobs):
    """Guesses that are right, wrong from the middle on, and longer than the answer."""
    config = dataclasses.replace(CUDA, encoder_batch=1, cuda_graph=graphs)
    runtime = NativeRuntime(int8_engine, config)
    jobs = [dataclasses.replace(job, options=options) for job in jobs[:6]]
    plain = run(runtime, jobs)
    steps = runtime.gauges().steps
    for change in (
        lambda tokens: tokens,
        lambda tokens: (*tokens[: len(tokens) // 2], 17, *tokens[len(tokens) // 2 :]),
        lambda tokens: (*tokens, *range(100)),
    ):
        drafted = [dataclasses.replace(job, draft=change(plain[job.id].tokens)) for job in jobs]
        for job_id, event in run(runtime, drafted).items():
            before = plain[job_id]
            assert (event.tokens, event.finished) == (before.tokens, before.finished)
            assert event.scores.avg_logprob == before.scores.avg_logprob
    assert runtime.gauges().steps < 3 * steps  # the right guesses saved theirs


@pytest.mark.parametrize("rows", [CUDA.slots, ROWS])
@pytest.mark.parametrize("kind", [whole, first_and_last_layer])
def test_a_draft_decoder_in_graphs_changes_no_bit(kind, rows, checkpoint, windows, tmp_path):
    """Greedy and sampled windows together, some with a search beside them where there are rows."""
    engine = write_drafted(checkpoint, kind, tmp_path / "engine")
    config = dataclasses.replace(CUDA, encoder_batch=1, cuda_graph=True, rows=rows)
    choices = OPTIONS[:3] if rows > CUDA.slots else OPTIONS[:2]
    jobs = []
    for i, (_, language, features) in enumerate(windows):
        asked = prompt_of(checkpoint.facts, language)
        asked = (asked[0], DETECT_LANGUAGE, *asked[2:]) if i % 5 == 0 else asked
        jobs.append(Job(i, features, asked, choices[i % len(choices)]))
    found = []
    for most in (0, 3):
        runtime = NativeRuntime(engine, dataclasses.replace(config, draft_tokens=most))
        found.append(run(runtime, jobs))
        gauges = runtime.gauges()
        runtime.close()
    plain, drafted = found
    for job_id, event in drafted.items():
        before = plain[job_id]
        assert (event.tokens, event.finished) == (before.tokens, before.finished)
        assert event.scores.avg_logprob == before.scores.avg_logprob
        assert event.scores.no_speech_prob == before.scores.no_speech_prob
    assert gauges.drafted_right <= gauges.drafted > 0
    if rows == CUDA.slots:  # else turns beside a search leave gaps in what the draft decoder knows
        assert gauges.drafted_right > 0
    if kind is whole and rows == CUDA.slots:  # the sampled ones, and the rules, differ from guesses
        assert gauges.drafted_right > 0.3 * gauges.drafted


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("rows", [CUDA.slots, ROWS])
def test_the_same_bits_in_any_company(rows, graphs, int8_engine, checkpoint, windows):
    """One window per encoder batch: what is left to differ is the decoder, and it must not."""
    facts, rng = checkpoint.facts, random.Random(3)
    config = dataclasses.replace(CUDA, encoder_batch=1, cuda_graph=graphs, rows=rows)
    runtime = NativeRuntime(int8_engine, config)
    choices = OPTIONS if rows > CUDA.slots else OPTIONS[:2]
    jobs = []
    for i, (_, language, features) in enumerate(windows):
        heard = DETECT_LANGUAGE if i % 3 else facts.languages[language]
        prompt = (facts.sot, heard, facts.transcribe)
        if i % 4 == 3:
            prompt = (facts.sot_prev, *range(50, 150), *prompt)  # a long one
        detection = Detection(certainty=1.0, max_languages=3) if i % 2 else Detection()
        jobs.append(Job(i, features, prompt, choices[i % len(choices)], detection=detection))
    alone = {job.id: run(runtime, [job])[job.id] for job in jobs}
    again = []
    for job in jobs:  # the second time with guesses, which has them encoded beside the steps
        draft = alone[job.id].tokens[:10] if rows_of(job) == 1 else ()
        again.append(dataclasses.replace(job, id=100 + job.id))
        again.append(dataclasses.replace(job, id=200 + job.id, draft=draft))
    rng.shuffle(again)
    ended = {}
    waiting = list(again)
    while len(ended) < len(again):
        if waiting and rng.random() < 0.3:
            runtime.submit(waiting.pop())
        for event in ends(runtime):
            ended[event.job_id] = event
    for job_id, event in ended.items():
        before = alone[job_id % 100]
        assert event.tokens == before.tokens
        assert event.scores.avg_logprob == before.scores.avg_logprob
        assert event.scores.no_speech_prob == before.scores.no_speech_prob
        assert event.scores.language_prob == before.scores.language_prob


@pytest.mark.parametrize("cross_kv", ["full", "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_words_are_where_the_cpu_finds_them(way, cross_kv, int8_engine, jobs):
    """All windows at once, in many passes, some cancelled while they are aligned."""
    jobs = [dataclasses.replace(job, align_frames=(400, 1500)[job.id % 2]) for job in jobs]
    cpu, gpu = (
        said(int8_engine, dataclasses.replace(config, cross_kv=cross_kv), jobs)
        for config in (RuntimeConfig(slots=8, encoder_batch=4), WAYS[way])
    )
    apart, probs = [], []
    for i, event in gpu.items():
        if event.tokens == cpu[i].tokens and event.alignment is not None:
            ours, theirs = event.alignment, monotonic_path(cpu[i].alignment.matrix)
            found = monotonic_path(ours.matrix) if way == "torch" else ours.begins
            apart += np.abs(found - theirs).tolist()
            probs += np.abs(event.alignment.token_probs - cpu[i].alignment.token_probs).tolist()
    assert len(apart) > 200
    assert np.mean(np.array(apart) <= 1) >= 0.98
    assert np.mean(probs) < 5e-3


@pytest.mark.parametrize("graphs", [False, True])
def test_words_change_no_bit_of_their_neighbours(graphs, int8_engine, checkpoint, jobs):
    config = dataclasses.replace(CUDA, encoder_batch=1, cuda_graph=graphs)
    runtime = NativeRuntime(int8_engine, config)
    plain = run(runtime, jobs)
    mixed = [dataclasses.replace(job, align_frames=700 * (job.id % 2)) for job in jobs]
    for job_id, event in run(runtime, mixed).items():
        assert event.tokens == plain[job_id].tokens
        assert event.scores.avg_logprob == plain[job_id].scores.avg_logprob
        has_text = any(token < checkpoint.facts.eot for token in event.tokens)
        assert (event.alignment is not None) == (job_id % 2 == 1 and has_text)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_window_may_be_cancelled_while_it_is_aligned(graphs, int8_engine, checkpoint, windows):
    runtime = NativeRuntime(int8_engine, dataclasses.replace(CUDA, cuda_graph=graphs))
    prompt = prompt_of(checkpoint.facts, "en")
    for turn in range(60):
        runtime.submit(Job(turn, windows[0][2], prompt, align_frames=300))
        ended = []
        for poll in range(1000):
            if poll == turn:
                runtime.cancel(turn)
            ended += ends(runtime)
            if ended and not runtime.gauges().busy_slots:
                break
        assert len(ended) == 1 and ended[0].job_id == turn
        assert (ended[0].finished == "cancelled") != (ended[0].alignment is not None)


@pytest.mark.parametrize("rows", [CUDA.slots, ROWS])
def test_nothing_is_compiled_in_service(rows, int8_engine, checkpoint, windows, monkeypatch):
    """Who comes first would wait for it, and everybody with them."""
    config = dataclasses.replace(CUDA, cuda_graph=True, cross_kv="int8", rows=rows)
    runtime = NativeRuntime(int8_engine, config)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **facts: compiled.append(facts["src"].name)
    )
    facts, jobs = checkpoint.facts, []
    for i, (_, language, features) in enumerate(windows):
        heard = facts.languages[language] if i % 4 else DETECT_LANGUAGE
        prompt = (facts.sot, heard, facts.transcribe)
        features = features[:, : (3000, 1000, 1400)[i % 3]]
        if i % 5 == 0:
            prompt = (facts.sot_prev, *range(50, 60 + 7 * i), *prompt)
        options = BEAM if rows > CUDA.slots and i % 3 == 0 else OPTIONS[i % 2]
        draft = tuple(range(300, 300 + 2 * i)) if i % 2 else ()
        jobs.append(Job(i, features, prompt, options, draft=draft, align_frames=90 + 67 * i))
    for job in jobs[:3]:
        run(runtime, [job])
    run(runtime, jobs[3:])
    runtime.close()
    assert compiled == []


@pytest.fixture(scope="module")
def turbo_engine():
    """An engine of turbo's shape."""
    shape = published_shape("openai/whisper-large-v3-turbo")
    with random_engine(shape, "int8", lambda line: None) as engine:
        yield engine


@pytest.mark.parametrize("frames", [3000, 1000])
@pytest.mark.parametrize("precision", ["full", "fp8"])
def test_a_window_is_encoded_to_the_same_bits_in_any_batch(turbo_engine, precision, frames):
    """With turbo's shape: the libraries' choices depend on sizes."""
    config = dataclasses.replace(CUDA, cuda_graph=True, slots=8, encoder_precision=precision)
    runtime = NativeRuntime(turbo_engine, config)
    encoder = runtime._scheduler._encoder
    (_, cache), *_ = encoder._decoders
    cache = cache.cross
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (8, turbo_engine.manifest.dims.n_mels, frames)
    features = torch.randn(shape, generator=generator, device="cuda")
    found = {}
    with torch.inference_mode():
        for count in (8, 4, 2, 1):
            cache.zero_()
            encoder.encode(list(features[:count]), list(range(count)))
            torch.cuda.synchronize()
            found[count] = cache[:, :, 0].clone()
    runtime.close()
    assert found[8].count_nonzero() > found[8].numel() / 2
    for count in (4, 2, 1):
        assert torch.equal(found[count], found[8]), count


def test_too_little_memory_is_an_error_at_the_start(int8_engine):
    with pytest.raises(UnavailableError, match=r"slots = 100000: .* set runtime\.slots = \d+$"):
        NativeRuntime(int8_engine, dataclasses.replace(CUDA, slots=100_000))


def test_the_plan_is_kept(int8_engine):
    """What is taken, graphs included, is no more than was planned."""
    before = torch.cuda.memory_reserved()
    runtime = NativeRuntime(int8_engine, dataclasses.replace(CUDA, cuda_graph=True, slots=64))
    planned = float(runtime.description.partition("memory ")[2].split()[0]) * 2**30
    assert torch.cuda.memory_reserved() - before < planned
