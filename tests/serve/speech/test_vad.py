"""Voice activity: as faster-whisper finds it, and the same however the audio arrives."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from faster_whisper import vad as peer
from faster_whisper.utils import get_assets_path

from serve.contract.errors import EarshotError
from serve.contract.messages import SpeechOptions
from serve.speech import vad
from serve.speech.features import SAMPLE_RATE
from serve.speech.vad import FRAME, SpeechFilter, VadModel
from tests.serve.speech.sounds import decode

DATA = Path(__file__).parents[2] / "data"
PEERS_MODEL = Path(get_assets_path()) / "silero_vad_v6.onnx"
CLIPS = ("en_question.wav", "en_three.mp3", "es_noisy.mp3", "en_telephone.wav", "noise.flac")


def load(name):
    return decode((DATA / name).read_bytes(), 3600)[0]


@pytest.fixture(scope="module")
def paused():
    """Speech between silence and faint noise, of several lengths."""
    speech, noise = load("en_three.mp3"), np.random.default_rng(0).normal(0, 0.01, 70_001)
    silence = np.zeros(5 * SAMPLE_RATE, np.float32)
    parts = [speech, silence, noise, speech[:70_003], silence[: 3 * SAMPLE_RATE], speech]
    return np.concatenate(parts).astype(np.float32)


def listen(samples, options, size=65_536, model=vad.MODEL, most_held=None):
    """Begin and end of what is let through, joined where it touches."""
    listener, found = SpeechFilter(options, VadModel(model)), []
    for i in range(0, len(samples), size):
        found += listener.push(samples[i : i + size])
        if most_held is not None:
            assert len(listener._buffer) <= most_held
    found += listener.finish()
    assert listener.received == len(samples)
    joined = []
    for speech in found:
        end = speech.start + len(speech.samples)
        np.testing.assert_array_equal(speech.samples, samples[speech.start : end])
        if joined and joined[-1][1] == speech.start:
            joined[-1][1] = end
        else:
            joined.append([speech.start, end])
    return joined


def peers(samples, options):
    """The same by faster-whisper; its stretches touch where the silence between is short."""
    stretches = peer.get_speech_timestamps(
        samples.copy(),  # it writes into it
        threshold=options.vad_threshold,
        min_silence_duration_ms=round(1000 * options.vad_min_silence_s),
        speech_pad_ms=round(1000 * options.vad_pad_s),
        min_speech_duration_ms=round(1000 * options.vad_min_speech_s),
    )
    joined = []
    for stretch in stretches:
        if joined and joined[-1][1] >= stretch["start"]:
            joined[-1][1] = stretch["end"]
        else:
            joined.append([stretch["start"], stretch["end"]])
    return joined


OPTIONS = [
    SpeechOptions(),
    SpeechOptions(vad_min_silence_s=2.0),  # faster-whisper's own, without a batch
    SpeechOptions(0.6, 0.1, 0.1, 0.03),  # silero-vad's own pad and silence
    pytest.param(SpeechOptions(0.3, 0.0, 0.0, 0.0), marks=pytest.mark.nightly),
    # Some of the clips' words are shorter.
    pytest.param(SpeechOptions(0.5, 1.0, 0.2, 0.0), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_speech_is_where_faster_whisper_finds_it_with_its_model(options, paused):
    for samples in (*(load(name) for name in CLIPS), paused):
        assert listen(samples, options, model=PEERS_MODEL) == peers(samples, options)


def test_the_defaults_are_those_with_which_the_peer_packs_windows():
    theirs = peer.VadOptions(min_silence_duration_ms=160)
    same = SpeechOptions(theirs.threshold, 0.0, 0.16, theirs.speech_pad_ms / 1000)
    assert dataclasses.replace(SpeechOptions(), vad_min_speech_s=0.0) == same
    assert theirs.min_speech_duration_ms == 0


@pytest.mark.parametrize("size", [311, FRAME, 4_000, 10**9])
def test_blocks_do_not_matter_and_little_is_held(size, paused):
    times = SpeechOptions.vad_pad_s, SpeechOptions.vad_min_silence_s, SpeechOptions.vad_min_speech_s
    most = round(sum(times) * SAMPLE_RATE) + 2 * FRAME
    expected = listen(paused, SpeechOptions())
    assert len(expected) == 3
    assert listen(paused, SpeechOptions(), size, most_held=most + FRAME) == expected


class Told(VadModel):
    """Says what it was told to say."""

    def __init__(self, probabilities):
        self._left = list(probabilities)

    def probabilities(self, samples):
        count = len(samples) // FRAME
        said, self._left = self._left[:count], self._left[count:]
        return np.array(said, np.float32)


@pytest.mark.parametrize("size", [1, 7, 1000])  # frames
def test_a_moment_is_no_speech_unless_it_goes_on(size):
    """Frames of 32 ms: three are too short for the tenth of a second, four are not."""
    options = SpeechOptions(vad_pad_s=0.0, vad_min_silence_s=3 * FRAME / SAMPLE_RATE)
    most = 3 * FRAME + round(options.vad_min_speech_s * SAMPLE_RATE) + (1 + size) * FRAME
    quiet = [0.0] * 10
    moment, word = [0.9, 0.4, 0.9], [0.9, 0.9, 0.9, 0.9]
    interrupted = [0.9, 0.1, 0.1, 0.9]  # for less than ends it
    listener = SpeechFilter(options, Told([*quiet, *moment, *quiet, *word, *quiet, *interrupted]))
    samples = np.zeros(41 * FRAME, np.float32)
    found = []
    for i in range(0, len(samples), size * FRAME):
        found += listener.push(samples[i : i + size * FRAME])
        assert len(listener._buffer) <= most
    found += listener.finish()
    kept = np.concatenate([np.arange(s.start, s.start + len(s.samples)) for s in found])
    expected = [*range(23 * FRAME, 27 * FRAME), *range(37 * FRAME, 41 * FRAME)]
    np.testing.assert_array_equal(kept, expected)


def test_without_speech_nothing_is_let_through_and_nothing_is_held():
    for samples in (load("noise.flac"), load("silence.wav"), np.zeros(0, np.float32)):
        most = round(SpeechOptions.vad_pad_s * SAMPLE_RATE) + FRAME
        assert listen(samples, SpeechOptions(), 8_000, most_held=most) == []


def test_the_rewritten_model_computes_what_the_published_one_does():
    """The probabilities in the file are those of Silero's own ONNX file."""
    published = json.loads((DATA / "speech_probabilities.json").read_text())
    samples = load("en_question.wav")
    for block in (FRAME, 10 * FRAME, 80 * FRAME):
        model = VadModel()
        found = [model.probabilities(samples[i : i + block]) for i in range(0, 80 * FRAME, block)]
        np.testing.assert_allclose(np.concatenate(found), published, atol=5e-5)


def test_the_model_is_the_one_whose_source_is_stated():
    folder, digest = vad.MODEL.parent, hashlib.sha256(vad.MODEL.read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    damaged = tmp_path / "model.onnx"
    for content in (b"", vad.MODEL.read_bytes()[:-1]):
        damaged.write_bytes(content)
        with pytest.raises(EarshotError, match=f"cannot load {damaged}: "):
            VadModel(damaged)
    with pytest.raises(EarshotError, match=r"cannot load .*none: "):
        VadModel(tmp_path / "none")
