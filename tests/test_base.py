"""What Whisper base makes of people: what the small checkpoint cannot show."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import char_counts, in_common
from serve.contract.config import load_config
from serve.contract.files import read_bytes
from serve.contract.messages import Request
from serve.speech.features import SAMPLE_RATE
from serve.transcriber.open import open_transcriber
from tests.conftest import BASE
from tests.marks import nightly
from tests.serve.speech.sounds import decode

MOST = 0.1  # of a clip's characters are wrong; at most 0.05 were, "15th" for "fifteenth" included


@pytest.fixture(scope="module")
def transcriber(base_engine):
    with open_transcriber(load_config(BASE), str(base_engine)) as transcriber:
        yield transcriber


@pytest.fixture(scope="module")
def transcribe(transcriber):
    """What `configs/base.toml` makes of a clip."""

    def transcribe(clip, **options):
        return transcriber.transcribe(Request(audio=read_bytes(clip.path), **options))

    return transcribe


@pytest.mark.parametrize(
    "file",
    [
        *("en_ljspeech_LJ001-0005.ogg", "zh_aishell_sample_BAC009S0150W0206.ogg"),
        *nightly("de_kerstin_de_rhasspy-1319.ogg", "fr_asterisk_demo-enterkeywords.ogg"),
        *nightly("es_librivox_aeneas_es.ogg"),
    ],
)
def test_it_understands_people(transcribe, human_clips, file):
    clip, normalize = human_clips[file], normalizer(DEFAULT)
    heard = transcribe(clip)
    assert heard.language == clip.language
    texts = (normalize(text, clip.language) for text in (clip.text, heard.text))
    counts = char_counts(*texts)
    assert counts.errors <= MOST * counts.length, heard.text


@pytest.mark.nightly
def test_numbers_are_words_where_that_is_asked_for(transcribe, human_clips):
    clip = human_clips["en_an4_test_an391-mjwl-b.ogg"]
    assert re.search(r"\d", transcribe(clip, language="en").text)
    heard = transcribe(clip, language="en", suppress_numerals=True).text
    assert not re.search(r"[0-9%$£]", heard) and "two" in heard.lower(), heard


@pytest.mark.nightly
def test_an_unsure_language_is_told_by_its_text(transcribe, human_clips):
    clip = human_clips["nl_nathalie_nl_rhasspy_376.ogg"]  # before its text, Arabic is likelier
    heard = transcribe(clip)
    assert heard.language == "nl" and heard.language_prob < 0.5
    assert heard.text == "Zij die oren hebben horen."


@pytest.mark.nightly
@pytest.mark.parametrize(
    "file", ["tests/data/es_two.flac", "tests/data/human/nl_nathalie_nl_rhasspy_376.ogg"]
)
def test_a_translation_is_made_from_the_language_that_is_spoken(transcriber, file):
    """The English text of another language is likelier in both."""
    heard = transcriber.transcribe(Request(read_bytes(file), task="translate"))
    assert heard.language == Path(file).name[:2], heard.text


@pytest.mark.nightly
def test_two_languages_of_a_file_keep_their_text(transcriber, human_clips):
    """English and, after a pause, German; nothing is asked for."""
    groups = ("en_ljspeech", "de_kerstin")
    clips = [[c for name, c in human_clips.items() if name.startswith(g)][:4] for g in groups]
    parts = []
    for some in clips:
        parts += [decode(read_bytes(clip.path))[0] for clip in some]
        parts.append(np.zeros(12 * SAMPLE_RATE))
    joined = np.concatenate(parts).astype(np.float32)
    heard = transcriber.transcribe(Request(joined, sample_rate=SAMPLE_RATE))
    assert {segment.language for segment in heard.segments} == {"en", "de"}
    assert "de is spoken at" in heard.warnings[0]
    normalize = normalizer(DEFAULT)
    said = normalize(" ".join(clip.text for clip in clips[1]), "de")
    text = "".join(s.text for s in heard.segments if s.language == "de")
    counts = char_counts(said, normalize(text, "de"))
    assert counts.errors <= 2 * MOST * counts.length, text


@pytest.mark.parametrize("vad", [None, pytest.param(False, marks=pytest.mark.nightly)])
def test_nothing_is_invented_where_nobody_speaks(transcriber, vad):
    """The network says "You", and is sure of it."""
    silence = np.zeros(5 * SAMPLE_RATE, np.float32)
    noise = np.random.default_rng(0).normal(0, 0.1, SAMPLE_RATE // 20).astype(np.float32)
    for samples in (silence, noise):
        asked = Request(samples, sample_rate=SAMPLE_RATE, vad=vad)
        assert transcriber.transcribe(asked).segments == ()


@pytest.mark.nightly
def test_one_word_is_kept_however_quiet(transcriber, human_clips):
    clip = human_clips["en_an4_train_an333-msrb-b.ogg"]
    samples, _ = decode(read_bytes(clip.path))
    quiet = (samples * 0.03).astype(np.float32)  # 64 dB below a square wave
    heard = transcriber.transcribe(Request(quiet, sample_rate=SAMPLE_RATE))
    assert heard.text.strip(" .").lower() == "yes"


@pytest.mark.nightly
def test_what_is_said_after_a_last_timestamp_is_not_lost(transcriber, human_clips):
    """Joined with short pauses, the first window's text ends a sentence before its audio does."""
    named = [clip for name, clip in human_clips.items() if name.startswith("en_kathleen")]
    parts = []
    for clip in named[72:84]:
        parts += [decode(read_bytes(clip.path))[0], np.zeros(2400)]
    joined = np.concatenate(parts).astype(np.float32)
    heard = transcriber.transcribe(Request(joined, sample_rate=SAMPLE_RATE, language="en"))
    normalize = normalizer(DEFAULT)
    said = normalize(" ".join(clip.text for clip in named[72:84]), "en").split()
    text = normalize(heard.text, "en").split()
    assert abs(len(text) - len(said)) <= 3, heard.text
    assert transcriber.stats().untold_s < 1.0


@pytest.mark.nightly
def test_words_are_where_another_aligner_has_them(transcribe, human_clips):
    """PocketSphinx has no pauses before a first word, so some times are off by 0.4 s."""
    reference = json.loads(Path("tests/data/word_times.json").read_text(encoding="utf-8"))["clips"]
    normalize, errors_s = normalizer(DEFAULT), []
    for file, known in reference.items():
        heard = transcribe(human_clips[file], word_timestamps=True)
        words = [word for segment in heard.segments for word in segment.words]
        texts = [normalize(word.word, "en") for word in words]
        for i, j in in_common(texts, [word for word, _, _ in known]):
            _, start_s, end_s = known[j]
            errors_s += [abs(words[i].start - start_s), abs(words[i].end - end_s)]
    assert len(errors_s) >= 2 * 50
    assert np.mean(errors_s) <= 0.1


LISTED = {  # rare words of each clip, 20 in all
    "0140": ["Pinocchio"],
    "0147": ["McGuinness", "Landwirten"],
    "0159": ["Wilmersdorfer", "Waldfriedhofs", "Stahnsdorf", "verwilderten"],
    "0184": ["Depeche"],
    "0289": ["Troost"],
    "0308": ["Döbereiner", "Triade"],
    "0539": ["Lennep", "Landgemeinde"],
    "0705": ["Mosambik", "Erdölvorkommen"],
    "0707": ["Corpsmitglieder", "Sachsen", "Preussen"],
    "1398": ["Reinickendorf", "Gemeinschaftsschule"],
}


@pytest.mark.nightly
def test_listed_words_come_out_right_and_none_is_invented(transcribe, human_clips):
    phrases = tuple(word for words in LISTED.values() for word in words)
    heard = {False: set(), True: set()}
    for number in LISTED:
        clip = human_clips[f"de_kerstin_de_rhasspy-{number}.ogg"]
        for listed in heard:
            text = transcribe(clip, language="de", phrases=phrases if listed else ()).text
            words = normalizer(DEFAULT)(text, "de").split()
            heard[listed] |= {(number, word) for word in phrases if word.lower() in words}
    said = {(number, word) for number, words in LISTED.items() for word in words}
    assert heard[True] <= said, "a word was invented"
    assert len(heard[True]) > len(heard[False])
