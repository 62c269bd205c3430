"""NativeRuntime against transformers, and against itself in every company."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from build.checkpoint import open_checkpoint
from build.reference import load_reference
from eval.random_whisper import PUBLISHED, random_weights, write_checkpoint
from serve.contract.config import RuntimeConfig
from serve.contract.engine import mel_filters
from serve.contract.errors import UnavailableError
from serve.native.network import Whisper
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Job
from serve.speech.features import WINDOW_SAMPLES, log_mel
from tests.checkpoints import write_engine
from tests.marks import nightly
from tests.serve.native.decoding import prompt_of, run


@pytest.fixture
def runtime(engine):
    runtime = NativeRuntime(
        engine, RuntimeConfig(slots=4, encoder_batch=3, threads=1, compute_type="float32")
    )
    yield runtime
    runtime.close()


def sampled(event, eot):
    return [*event.tokens, eot] if event.finished == "eot" else list(event.tokens)


@torch.inference_mode()
def greedy(model, features, prompt, max_tokens, eot, timestamps=True):
    """What transformers samples for each window of a batch, end of text included."""
    processors = []
    if timestamps:
        processors.append(
            transformers.generation.WhisperTimeStampLogitsProcessor(
                model.generation_config, begin_index=len(prompt)
            )
        )
    ids = transformers.GenerationMixin.generate(
        model,
        features,
        decoder_input_ids=torch.tensor([prompt] * len(features)),
        logits_processor=processors,
        max_new_tokens=max_tokens,
    )
    rows = [row[len(prompt) :].tolist() for row in ids]
    return [row[: row.index(eot) + 1] if eot in row else row for row in rows]


@pytest.mark.parametrize("every", [11, *nightly(2)])
def test_greedy_equals_transformers_token_for_token_on_bundled_clips(
    checkpoint, runtime, windows, every
):
    """Of a short clip in each language, or of half of the windows."""
    windows = windows[::every]
    facts, model = checkpoint.facts, load_reference(checkpoint)
    expected = {}
    for language in sorted({language for _, language, _ in windows}):
        chosen = [i for i, window in enumerate(windows) if window[1] == language]
        features = torch.stack([windows[i][2] for i in chosen])
        rows = greedy(model, features, prompt_of(facts, language), 224, facts.eot)
        expected |= dict(zip(chosen, rows, strict=True))
    jobs = [Job(i, w[2], prompt_of(facts, w[1])) for i, w in enumerate(windows)]
    ended = run(runtime, jobs)
    for i, (clip, _, _) in enumerate(windows):
        assert sampled(ended[i], facts.eot) == expected[i], clip


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "encoder", "decoder"), [("tiny", 2, 2), ("large-v3-turbo", 1, 1)])
def test_greedy_equals_transformers_on_random_weights_of_published_shapes(
    size, encoder, decoder, tmp_path
):
    """Published widths, reduced depth."""
    shape = dataclasses.replace(PUBLISHED[size], encoder_layers=encoder, decoder_layers=decoder)
    dims, weights = shape.dims, random_weights(shape, spread=2.0 * shape.width**-0.5)
    made = open_checkpoint(str(write_checkpoint(tmp_path / "hf", shape, weights)))
    facts = made.facts
    prompt = prompt_of(facts, "es")
    noise = torch.randn(2, WINDOW_SAMPLES, generator=torch.Generator().manual_seed(1)) * 0.1
    noise[1, 100_000:] = 0
    features = log_mel(noise, mel_filters(dims.n_mels))
    reference = load_reference(made)
    runtime = NativeRuntime(
        write_engine(made, tmp_path / size, "fp16"),
        RuntimeConfig(slots=2, encoder_batch=2, threads=1, compute_type="float32"),
    )
    for timestamps in (True, False):
        asked = prompt + (() if timestamps else (facts.no_timestamps,))
        expected = greedy(reference, features, asked, 64, facts.eot, timestamps)
        options = DecodingOptions(timestamps=timestamps, max_tokens=64)
        ended = run(runtime, [Job(i, features[i], asked, options) for i in range(2)])
        got = [sampled(ended[i], facts.eot) for i in range(2)]
        assert got == expected
        assert max(len(set(row)) for row in got) > 8  # the rows say something


@pytest.mark.nightly
def test_a_short_window_says_what_the_whole_one_says(checkpoint, runtime, windows):
    clip, language, features = windows[0]
    assert clip == "en_question.wav"  # 2.6 s
    prompt = prompt_of(checkpoint.facts, language)
    whole = Job(0, features, prompt, align_frames=128)
    short = Job(1, features[:, :400], prompt, align_frames=128)
    longer = Job(2, windows[2][2], prompt, align_frames=1200)  # more than short ones' keys
    ended = run(runtime, [whole, short, longer])
    assert ended[0].tokens == ended[1].tokens
    matrices = [ended[job].alignment.matrix for job in (0, 1)]
    assert matrices[1].shape[1] == 128
    assert np.corrcoef(*(matrix.flat for matrix in matrices))[0, 1] > 0.98, (
        "words are where they were"
    )


def test_scores_are_those_of_openai(checkpoint, runtime, windows):
    """The average log-probability and no-speech probability, computed from the logits anew."""
    facts = checkpoint.facts
    prompt = (*prompt_of(facts, "en"), facts.no_timestamps)
    features = windows[2][2]
    event = run(runtime, [Job(0, features, prompt, DecodingOptions(timestamps=False))])[0]
    tokens = sampled(event, facts.eot)
    model = load_reference(checkpoint)
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits = model(features[None], decoder_input_ids=ids).logits[0]
    no_speech = logits[0].softmax(-1)[facts.no_speech]
    logits = logits[len(prompt) - 1 :].clone()
    logits[:, list(facts.suppress_tokens)] = -torch.inf
    logits[0, list(facts.begin_suppress_tokens)] = -torch.inf
    chosen = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    assert event.scores.avg_logprob == pytest.approx(float(chosen.mean()), abs=1e-3)
    assert event.scores.no_speech_prob == pytest.approx(float(no_speech), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"device": "tpu"}, "not a device"),
        ({"cuda_graph": True}, "cuda_graph = true needs a CUDA device"),
        ({"slots": 4, "rows": 2}, r"runtime\.rows = 2 is less than runtime\.slots"),
    ],
)
def test_settings_that_cannot_be_had_here_are_refused(engine, settings, message):
    with pytest.raises(UnavailableError, match=message):
        NativeRuntime(engine, RuntimeConfig(**settings))


def test_slots_and_rows_take_what_the_plan_says(engine):
    dims, cpu = engine.manifest.dims, torch.device("cpu")
    network = Whisper(dims, engine.load_weights(), cpu)
    for precision in ("full", "int8"):
        cache = vars(network.new_cache(3, 7, precision))
        allocated = sum(tensor.nbytes for tensor in filter(torch.is_tensor, cache.values()))
        assert network.cache_bytes(3, 7, precision) == allocated
