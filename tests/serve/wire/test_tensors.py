"""Requests and answers survive their way through tensors."""

import dataclasses

import numpy as np
import pytest

from serve.contract.errors import AudioError, EarshotError, OptionError
from serve.contract.messages import Request
from serve.wire import tensors
from tests.serving import SEGMENT, TRANSCRIPT

FULL = Request(
    audio=b"RIFF",
    language="en",
    languages=("en", "Español"),
    multilingual=True,
    task="translate",
    mode="sequential",
    prompt="Zoë",
    hotwords="naïve, 世界",
    phrases=("Zoë", "Anna Karenina^2"),
    prefix="Where",
    audio_track="spa",
    timestamps=False,
    word_timestamps=True,
    try_word_timestamps=True,
    token_logprobs=True,
    low_confidence=0.5,
    channels="split",
    diarize=True,
    num_speakers=3,
    min_speakers=2,
    max_speakers=4,
    known_speaker_names=("Ann", "Zoë"),
    known_speaker_references=("data:;base64,AA==", "data:;base64,AQ=="),
    partial=True,
    clip_timestamps=(0.1, 20.0, 3600.25),
    hallucination_silence_threshold=1.5,
    vad="off",
    voice=(0.25, 1.5),
    vad_threshold=0.3,
    vad_min_speech_s=0.3,
    vad_min_silence_s=0.5,
    vad_pad_s=0.2,
    temperature=0.2,
    max_tokens=7,
    beam_size=5,
    patience=1.1,
    length_penalty=0.7,
    best_of=4,
    repetition_penalty=1.3,
    no_repeat_ngram_size=3,
    suppress_blank=False,
    suppress_numerals=True,
    short_encoder=True,
    unfinished=True,
    draft=(50, 7),
)


def test_the_full_request_says_everything():
    said = {name for name, value in vars(FULL).items() if value != vars(Request(b""))[name]}
    assert vars(FULL).keys() - said == {"sample_rate"}, "which goes with samples"


@pytest.mark.parametrize("request_", [Request(audio=b""), FULL], ids=["least", "full"])
def test_a_request_comes_back_as_it_was(request_):
    inputs = tensors.request_to_inputs(request_)
    assert tensors.request_from_inputs(inputs) == request_
    lengths = {"DRAFT": 2, "CLIP_TIMESTAMPS": 3, "VOICE": 2, "LANGUAGES": 2, "PHRASES": 2}
    lengths |= {"KNOWN_SPEAKER_NAMES": 2, "KNOWN_SPEAKER_REFERENCES": 2}
    for name, length in lengths.items():
        assert inputs.pop(name, np.zeros(length)).shape == (length,)
    assert all(values.shape == (1,) for values in inputs.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": "five"}, "beam_size = 'five'; expected a whole number"),
        ({"timestamps": 0.5}, "timestamps = 0.5; expected true or false"),
        ({"draft": 1}, "draft = 1; expected a list"),
        ({"clip_timestamps": (0, "10")}, "clip_timestamps = '10'; expected a number"),
        (
            {"max_tokens": 2**31},
            "max_tokens = 2147483648; expected a whole number below 2147483648",
        ),
    ],
)
def test_a_value_that_a_tensor_cannot_hold_is_refused_before_it_is_sent(options, message):
    with pytest.raises(OptionError, match=message):
        tensors.request_to_inputs(Request(b"", **options))


def test_samples_keep_their_values():
    samples = np.linspace(-1, 1, 9)[::2]  # neither float32 nor contiguous
    found = tensors.request_from_inputs(tensors.request_to_inputs(Request(samples, 8_000)))
    assert found.audio.dtype == np.float32 and found.sample_rate == 8_000
    np.testing.assert_allclose(found.audio, samples, atol=1e-7)


@pytest.mark.parametrize(
    "inputs, error, message",
    [
        ({}, AudioError, "neither AUDIO nor SAMPLES"),
        ({"AUDIO": [b"x"], "SAMPLES": np.zeros(3)}, AudioError, "both AUDIO and SAMPLES"),
        ({"AUDIO": [b"x"], "LANGUAGES": [b"en", b"\xff"]}, OptionError, "LANGUAGES is not UTF-8"),
        ({"AUDIO": [b"x"], "PROMPT": [b"\xff"]}, OptionError, "PROMPT is not UTF-8"),
    ],
)
def test_what_cannot_be_a_request_is_refused_by_name(inputs, error, message):
    with pytest.raises(error, match=message):
        tensors.request_from_inputs(inputs)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, spec in tensors.INPUTS.items()
        if spec.datatype == "BYTES" and name not in ("AUDIO", "KNOWN_SPEAKER_REFERENCES")
    ],
)
def test_two_megabytes_of_any_text_are_refused_and_not_echoed(name):
    tensor = np.array([b"x" * 2_000_000], np.object_)
    told = f"{name} has 2000000 bytes; expected at most .*: send less text"
    with pytest.raises(OptionError, match=told) as refused:
        tensors.request_from_inputs({"AUDIO": np.array([b"x"], np.object_), name: tensor})
    assert len(str(refused.value)) < 100


def test_an_error_says_at_most_what_somebody_may_read():
    text = tensors.error_to_text(AudioError("begin" + "x" * 2_000_000 + "end"))
    assert len(text) < 2100
    assert text.startswith("AudioError: begin") and text.endswith("end")


@pytest.mark.parametrize("prob", [0.5, None])
def test_an_answer_comes_back_as_it_was(prob):
    warnings = () if prob is None else ("audio is cut short", "several tracks")
    transcript = dataclasses.replace(TRANSCRIPT, language_prob=prob, warnings=warnings)
    outputs = tensors.transcript_outputs(transcript)
    assert set(outputs) <= set(tensors.OUTPUTS)
    assert tensors.is_whole(outputs.get)
    assert tensors.transcript_from_outputs(outputs.get) == transcript


def test_a_segment_on_its_own_is_not_an_answer():
    outputs = tensors.segment_outputs(SEGMENT)
    assert not tensors.is_whole(outputs.get)
    assert tensors.segments_from_outputs(outputs.get) == (SEGMENT,)
    with pytest.raises(EarshotError, match="lacks DURATION"):
        tensors.transcript_from_outputs(outputs.get)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("SEGMENTS", "[", "the answer's SEGMENTS is not JSON"),
        ("SEGMENTS", "[{}]", r"SEGMENTS: \[0\]\.start is missing; .*; expected a server of this"),
        ("TIMINGS", '{"wait_s": 1}', "TIMINGS: unknown key 'wait_s'.* of this Earshot version"),
    ],
)
def test_the_answer_of_another_version_is_said_to_be_one(name, text, message):
    outputs = tensors.transcript_outputs(TRANSCRIPT)
    outputs[name] = np.array([text.encode("latin-1")], np.object_)
    with pytest.raises(EarshotError, match=message):
        tensors.transcript_from_outputs(outputs.get)


def test_an_answer_in_which_nobody_speaks_has_no_language():
    silent = dataclasses.replace(
        TRANSCRIPT, text="", segments=(), language=None, language_prob=None
    )
    outputs = tensors.transcript_outputs(silent)
    assert "LANGUAGE" not in outputs
    assert tensors.transcript_from_outputs(outputs.get) == silent
