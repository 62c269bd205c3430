"""build.verify: a sound engine passes in both precisions, a wrong one is caught and named."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from build import verify
from build.checkpoint import open_checkpoint
from build.draft import with_draft
from build.recordings import VerificationAudio, read_recording, recordings_of
from eval.random_whisper import write_json
from serve.contract.errors import AudioError, ConfigError, EngineError
from serve.contract.manifest import WEIGHTS_FILE
from serve.native import resources
from serve.speech.features import SAMPLE_RATE
from tests.checkpoints import write_engine, write_nano


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(verify, "MAX_TOKENS", 12)


@pytest.fixture(scope="module")
def recordings():
    """Noise, which a checkpoint of random weights hears as well as speech."""
    noise = np.random.default_rng(0).standard_normal(6 * SAMPLE_RATE)
    return [VerificationAudio("noise.wav", (0.1 * noise).astype(np.float32))]


def test_fp16_is_equal_and_int8_close(checkpoint, tmp_path, recordings):
    fp16 = verify.verify(write_engine(checkpoint, tmp_path / "a", "fp16"), checkpoint, recordings)
    assert fp16.logits_relative < 1e-5  # float16 weights, computed in float32
    assert (fp16.token_agreement, fp16.greedy_agreement) == (1.0, 1.0)
    assert fp16.windows == 1 and 0 < fp16.tokens <= verify.MAX_TOKENS
    int8 = verify.verify(write_engine(checkpoint, tmp_path / "b", "int8"), checkpoint, recordings)
    assert fp16.logits_relative < int8.logits_relative < 0.05
    assert fp16.fp16_greedy_agreement == int8.fp16_greedy_agreement == 1.0


@pytest.mark.parametrize(
    "damaged", ["encoder.layers.1.mlp.fc2.weight", "decoder.layers.0.cross.q.bias"]
)
def test_a_wrong_tensor_is_caught(checkpoint, tmp_path, recordings, damaged):
    """The manifest fits the file, so nothing but the numbers can tell."""
    tensors = dict(checkpoint.tensors)
    tensors[damaged] = tensors[damaged].flip(0) + 0.3
    wrong = dataclasses.replace(checkpoint, tensors=tensors)
    engine = write_engine(wrong, tmp_path / "engine", "fp16")
    with pytest.raises(EngineError, match=r"does not match its checkpoint, .*: logits deviate by"):
        verify.verify(engine, checkpoint, recordings)


def test_the_operations_that_serve_are_the_ones_that_are_scored(
    checkpoint, tmp_path, recordings, monkeypatch
):
    """Greedy tokens cannot tell: every logit is wrong by the same factor."""
    engine, choose = write_engine(checkpoint, tmp_path / "engine", "fp16"), resources.choose

    def slightly_wrong(*arguments):
        chosen = choose(*arguments)
        plain = chosen.decoder
        own = {name: getattr(plain, name) for name in dir(plain) if name[0] != "_"}
        changed = {**own, "logits": lambda *inputs: 1.02 * plain.logits(*inputs)}
        return dataclasses.replace(chosen, decoder=types.SimpleNamespace(**changed))

    monkeypatch.setattr(resources, "choose", slightly_wrong)
    with pytest.raises(EngineError, match=r"logits deviate by 2\.00%"):
        verify.verify(engine, checkpoint, recordings)


def test_int8_rounding_may_change_the_text_but_not_the_logits(
    checkpoint, tmp_path, recordings, monkeypatch
):
    """Greedy agreement is chaotic; what is scored given the same text is not."""
    engine = write_engine(checkpoint, tmp_path / "engine", "int8")
    agreed = iter((0.55, 1.0))  # INT8, FP16
    monkeypatch.setattr(verify, "agreement", lambda *_: next(agreed))
    assert verify.verify(engine, checkpoint, recordings).greedy_agreement == 0.55
    agreed = iter((0.3, 1.0))
    with pytest.raises(EngineError, match=r"greedy agreement is 30\.00%, .*FP16 weights match"):
        verify.verify(engine, checkpoint, recordings)
    agreed = iter((0.9, 0.9))
    with pytest.raises(EngineError, match=r"fp16 greedy agreement is 90\.00%, .*is not the cause"):
        verify.verify(engine, checkpoint, recordings)


def test_nan_does_not_pass(checkpoint, tmp_path, recordings, monkeypatch):
    engine = write_engine(checkpoint, tmp_path / "engine", "fp16")

    def load_weights(self, device="cpu"):
        weights = load_file(self.path / WEIGHTS_FILE)
        return weights | {"decoder.norm.bias": weights["decoder.norm.bias"] * float("nan")}

    monkeypatch.setattr(type(engine), "load_weights", load_weights)
    with pytest.raises(EngineError, match="logits deviate by nan%"):
        verify.verify(engine, checkpoint, recordings)


def test_a_drafts_decoder_is_no_part_of_it(nano_folder, checkpoint, tmp_path, recordings):
    """A draft never changes a text, so the checkpoint alone tells whether texts are right."""
    engine = write_engine(with_draft(checkpoint, str(nano_folder)), tmp_path / "engine", "int8")
    assert verify.verify(engine, checkpoint, recordings).fp16_greedy_agreement == 1.0


def test_an_engine_of_other_weights_is_refused(checkpoint, tmp_path, recordings):
    engine = write_engine(checkpoint, tmp_path / "engine", "fp16")
    folder = write_nano(tmp_path / "other", seed=1)
    with pytest.raises(EngineError, match=r"was built from .* not from .*other"):
        verify.verify(engine, open_checkpoint(str(folder)), recordings)


def test_a_checkpoint_is_verified_on_languages_that_it_knows(checkpoint):
    manifest = Path("tests/data/demo.jsonl")
    english = dataclasses.replace(checkpoint.facts, languages={}, transcribe=None, translate=None)
    assert not english.multilingual
    recordings = recordings_of(manifest, english)
    assert {recording.language for recording in recordings} == {"en"} and len(recordings) > 1
    spanish = dataclasses.replace(checkpoint.facts, languages={"es": 3})
    assert {one.language for one in recordings_of(manifest, spanish)} == {"es"}
    finnish = dataclasses.replace(checkpoint.facts, languages={"fi": 3})
    with pytest.raises(ConfigError, match="in a language of the checkpoint"):
        recordings_of(manifest, finnish)


def test_audio_that_cannot_be_read(tmp_path, checkpoint):
    (tmp_path / "text.wav").write_text("no audio")
    with pytest.raises(AudioError, match=r"text.wav: audio is text, not a recording"):
        read_recording(tmp_path / "text.wav")
    write_json(tmp_path / "manifest.jsonl", {"file": "a.wav"})
    with pytest.raises(ConfigError, match=r"manifest.jsonl:1: text is missing; has file"):
        recordings_of(tmp_path / "manifest.jsonl", checkpoint.facts)


def test_a_manifest_without_a_clip_that_fits_is_refused_not_passed_over(tmp_path, checkpoint):
    (tmp_path / "a.wav").touch()
    clip = {"file": "a.wav", "text": "long", "language": "en", "duration": 30.1}
    write_json(tmp_path / "manifest.jsonl", clip)
    with pytest.raises(ConfigError, match="with text, of at most 30 s and in a language"):
        recordings_of(tmp_path / "manifest.jsonl", checkpoint.facts)
