"""The held-out clips that are kept: the files say what their manifest does."""

import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from build.demo.maker import heldout_clips
from build.demo.maker.sentences import ENGLISH, SPANISH
from build.demo.maker.sound import SAMPLE_RATE
from build.demo.maker.text import sentences, split_of
from build.demo.maker.voices import UNSEEN_ACCENT, UNSEEN_FLITE_VOICE, UNSEEN_VARIANTS
from serve.clips import load_clips
from serve.speech.audio import decode, whole
from serve.speech.meter import Limits

DATA = Path("tests/data/heldout")
LINES = [json.loads(line) for line in (DATA / "manifest.jsonl").read_text("utf-8").splitlines()]


def test_there_are_enough_of_both_languages_and_they_stay_small():
    clips = load_clips(DATA / "manifest.jsonl")
    assert len(clips) >= 300
    for language in ("en", "es"):
        assert sum(clip.language == language for clip in clips) >= 140
    assert {path.name for path in DATA.glob("*.opus")} == {clip.file for clip in clips}
    assert sum(clip.path.stat().st_size for clip in clips) < 4_000_000
    assert len({clip.text for clip in clips}) == len(clips)


def test_every_file_is_speech_as_long_as_the_manifest_says():
    for line in LINES:
        data = (DATA / line["file"]).read_bytes()
        assert data[:4] == b"OggS" and b"OpusHead" in data[:64], line["file"]
        samples = whole(decode(data, Limits(60.0)))
        seconds = len(samples) / SAMPLE_RATE
        assert seconds == pytest.approx(line["duration"], abs=0.01), line["file"]
        assert heldout_clips.SHORTEST_S <= seconds <= heldout_clips.LONGEST_S, line["file"]
        assert np.abs(samples).max() > 0.2, line["file"]


def test_voices_are_those_that_training_never_heard():
    for line in LINES:
        engine, name = line["voice"].split("/")
        accent, _, variant = name.partition("+")
        if engine == "flite":
            assert name == UNSEEN_FLITE_VOICE
        else:
            assert variant in UNSEEN_VARIANTS or accent == UNSEEN_ACCENT, line["voice"]


def test_sentences_are_the_written_ones_and_the_grammars_held_out_split():
    written = [line["text"] for line in LINES if line["source"] == "written"]
    assert sorted(written) == sorted([*ENGLISH, *SPANISH])
    drawn = [line["text"] for line in LINES if line["source"] == "grammar"]
    assert len(drawn) + len(written) == len(LINES)
    assert {split_of(text) for text in drawn} == {"heldout"}
    for text in (*ENGLISH, *SPANISH):
        assert text[-1] in ".?" and not re.search(r"\d", text), text


def test_a_third_has_words_that_the_grammar_lacks():
    known = {
        word
        for item in islice(sentences(0), 30_000)
        for word in re.findall(r"[\w']+", item.text.lower())
    }
    beyond = [line for line in LINES if set(re.findall(r"[\w']+", line["text"].lower())) - known]
    assert len(beyond) > len(LINES) / 3


def test_some_have_mild_noise():
    ratios = [line["snr_db"] for line in LINES if line["snr_db"] is not None]
    assert len(ratios) >= len(LINES) / 5
    low, high = heldout_clips.SNR_DB
    assert low <= min(ratios) and max(ratios) <= high


def test_opus_files_come_out_the_same_again(tmp_path):
    samples = np.sin(np.arange(SAMPLE_RATE) / 20).astype(np.float32) / 2
    for name in ("a.opus", "b.opus"):
        heldout_clips.write_opus(tmp_path / name, samples)
    assert (tmp_path / "a.opus").read_bytes() == (tmp_path / "b.opus").read_bytes()
    assert len(whole(decode((tmp_path / "a.opus").read_bytes(), Limits(60.0)))) == SAMPLE_RATE


def test_noise_has_the_ratio_that_was_asked_for():
    speech = np.sin(np.arange(1, SAMPLE_RATE) / 7).astype(np.float32) / 10
    noisy = heldout_clips._with_noise(speech, 20.0, seed=1)
    noise = noisy - speech
    assert 10 * np.log10(np.square(speech).mean() / np.square(noise).mean()) == pytest.approx(
        20, abs=0.1
    )
