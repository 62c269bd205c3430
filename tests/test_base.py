"""What Whisper base makes of people: what nobody could see on the small checkpoint."""

import pytest

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import char_counts
from serve.config import load_config
from serve.files import read_bytes
from serve.messages import Request
from serve.transcriber.open import open_transcriber
from tests.conftest import BASE

MOST = 0.1  # of a clip's characters are wrong; at most 0.05 were, "15th" for "fifteenth" included


@pytest.fixture(scope="module")
def transcribe(base_engine):
    """What `configs/base.toml` makes of a clip."""
    with open_transcriber(load_config(BASE), str(base_engine)) as transcriber:

        def transcribe(clip, **options):
            return transcriber.transcribe(Request(audio=read_bytes(clip.path), **options))

        yield transcribe


@pytest.mark.parametrize(
    "file",
    [
        "en_ljspeech_LJ001-0005.ogg",
        "de_kerstin_de_rhasspy-1319.ogg",
        "fr_asterisk_demo-enterkeywords.ogg",
        "zh_aishell_sample_BAC009S0150W0206.ogg",
        "es_librivox_aeneas_es.ogg",
    ],
)
def test_it_understands_people(transcribe, human_clips, file):
    clip, normalize = human_clips[file], normalizer(DEFAULT)
    heard = transcribe(clip)
    assert heard.language == clip.language
    texts = (normalize(text, clip.language) for text in (clip.text, heard.text))
    counts = char_counts(*texts)
    assert counts.errors <= MOST * counts.length, heard.text


def test_an_unsure_language_is_told_by_its_text(transcribe, human_clips):
    clip = human_clips["nl_nathalie_nl_rhasspy_376.ogg"]  # before its text, Arabic is likelier
    heard = transcribe(clip)
    assert heard.language == "nl" and heard.language_prob < 0.5
    assert heard.text == "Zij die oren hebben horen."


def test_a_language_that_is_no_candidate_is_not_heard(transcribe, human_clips):
    clip = human_clips["nl_nathalie_nl_rhasspy_376.ogg"]
    heard = transcribe(clip, languages=["German", "nl", "en"])
    assert heard.language == "nl" and heard.language_prob > 0.5
