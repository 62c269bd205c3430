"""Plans: which options are refused, by name, and what the others become."""

import dataclasses

import numpy as np
import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import AudioError, ConfigError, OptionError
from serve.contract.messages import Request
from serve.speech.tokenizer import Tokenizer
from serve.transcriber import decoding_plan
from serve.transcriber.decoding_plan import MIB, check_config, plan_request, with_texts
from serve.transcriber.prompts import PromptTexts, trie_of
from tests.fakes import CAPABILITIES, CONFIDENCE, fake_engine

N_TEXT_CTX = 448
SECOND = np.zeros(16_000, np.float32)
TRANSLATED = {"task": "translate"}
SEARCH = {"beam_width": 8, "search_options": True, "words": True}
FILE = {"audio": b"RIFF", "sample_rate": None}
VOICE = "data:audio/wav;base64,UklGRg=="


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return fake_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def tokenizer(engine):
    return Tokenizer(engine)


@pytest.fixture
def plan(tokenizer, engine):
    def plan(lacks=None, config=None, confidence=None, **options):
        request = Request(**{"audio": SECOND, "sample_rate": 16_000, **options})
        capabilities = dataclasses.replace(CAPABILITIES, **lacks or {})
        config = config or TranscriberConfig()
        manifest = dataclasses.replace(engine.manifest, confidence=confidence)
        made = plan_request(request, tokenizer, capabilities, config, manifest)
        return with_texts(made, tokenizer, config, manifest.dims.n_text_ctx)

    return plan


@pytest.mark.parametrize("as_file", [True, False])
def test_audio_that_is_too_large_is_refused(plan, as_file, monkeypatch):
    monkeypatch.setattr(decoding_plan, "MAX_AUDIO_MB", 1)
    samples = np.zeros(MIB // 4 + 1, np.float32)
    too_large = {"audio": samples.tobytes(), "sample_rate": None} if as_file else {"audio": samples}
    with pytest.raises(AudioError, match=r"audio has 1\.0 MiB; expected at most 1: send"):
        plan(**too_large)
    plan(**too_large | {"audio": too_large["audio"][:-4]})


def test_auto_is_no_language_and_a_tag_counts_by_its_first_part(plan):
    assert plan(language="auto", languages=["de-DE", "es"]) == plan(languages=["de", "es"])
    assert plan(language=" Auto ", multilingual=True).request.multilingual
    assert plan(language="es-419").language == "es"


def test_who_never_learnt_to_translate_does_not(plan):
    asked = {"task": "translate", "language": "es"}
    assert plan(**asked).language == "es"
    with pytest.raises(OptionError, match=r"^task = 'translate'.*transcriber.translate"):
        plan(config=TranscriberConfig(translate=False), **asked)


def known(names, *references):
    return {
        "diarize": True,
        "known_speaker_names": tuple(names) if len(references) > 1 else (names,),
        "known_speaker_references": references,
    }


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 225}, "max_tokens = 225; expected a number from 1 to 224"),
        ({"max_tokens": 224, "prompt": "word " * 400}, "the prompt leaves room for 221"),
        ({"beam_size": 0}, "beam_size = 0; expected at least 1"),
        ({"beam_size": 9}, "beam_size = 9; expected at most 8"),
        ({"patience": 0.0}, "patience = 0.0; expected at least 0.1"),
        ({"no_repeat_ngram_size": 449}, "no_repeat_ngram_size = 449; expected at most 448"),
        ({"phrases": "Anna"}, "phrases = 'Anna'; expected a list"),
        ({"draft": (1, -1)}, r"draft = \(1, -1\); expected at most 448 token ids below"),
        ({"vad": "maybe"}, "vad = 'maybe'; expected auto, on, off"),
        ({"vad_threshold": 1.0}, "vad_threshold = 1.0; expected less than 1"),
        ({"clip_timestamps": "0,10"}, "clip_timestamps = '0,10'; expected a list"),
        ({"clip_timestamps": (5, 3)}, "clip_timestamps has 5 to 3 s after 0 s; expected start"),
        ({"clip_timestamps": (0.0,) * 2049}, "clip_timestamps has 2049 numbers; expected at most"),
        ({"mode": "serial"}, "mode = 'serial'; expected parallel or sequential"),
        ({"voice": (0.0, 1.0), "vad": True}, "voice = .* with vad = 'on'; expected one of them"),
        ({"languages": ["de", "es"]}, r"languages = \['de', 'es'\] with language = 'en'; expec"),
        ({"multilingual": True}, "multilingual = true with language = 'en'; expected one"),
        ({"hotwords": "fox <|en|>"}, "hotwords holds the special token"),
        ({"hotwords": "word " * 400}, "hotwords has 1999 characters, more than 223 tokens"),
        ({"prefix": "fox " * 60, "hotwords": "word " * 40}, "prefix has 239 characters, more"),
        ({"audio_track": "1"}, "audio_track = '1', but raw samples have one channel"),
        ({**FILE, "audio_track": "es;"}, "audio_track = 'es;'; expected a track number"),
        ({**FILE, "audio_track": " "}, "audio_track = ''; expected a track number"),
        ({"hallucination_silence_threshold": float("inf")}, "threshold = inf; expected a number"),
        ({"channels": "split"}, "channels = 'split', but raw samples have one channel"),
        ({**FILE, "channels": "split", "diarize": True}, "channels = .*; expected one"),
        ({"num_speakers": 2}, "num_speakers = 2 needs diarize = true"),
        ({"diarize": True, **TRANSLATED}, "diarize = true, but a translation's words"),
        ({"diarize": True, "known_speaker_names": ("Ann",)}, "known_speaker_names has 1 and "),
        (known("Ann", "ann.wav"), "expected data URLs in base64"),
        (known("AA", VOICE, VOICE), "expected distinct names"),
    ],
)
def test_wrong_options_are_refused_by_name(plan, options, name):
    with pytest.raises(OptionError, match=name):
        plan(SEARCH, **{"language": "en", **options})


@pytest.mark.parametrize(
    ("lacks", "options", "name"),
    [
        ({"sampling": False}, {"temperature": 0.5}, "temperature"),
        ({"timestamps": False}, {}, "timestamps"),
        ({"detect_language": False}, {"language": None}, "language"),
        ({"languages": False}, {"language": None, "languages": ["en"]}, "languages"),
        ({"short_windows": False}, {"short_encoder": True}, "short_encoder"),
        ({"previous_text": False}, {"mode": "sequential"}, "mode = sequential"),
    ],
)
def test_what_the_runtime_cannot_do_is_refused(plan, lacks, options, name):
    options = {"language": "en", **options}
    assert plan(**options)
    with pytest.raises(OptionError, match=f"{name}.*fake"):
        plan(lacks, **options)


@pytest.mark.parametrize(
    ("able", "option", "message"),
    [
        ({}, {"beam_size": 2}, "beam_size = 2, .* has at most 1 rows .*rows of at least 2 "),
        ({"beam_width": 4}, {"best_of": 5}, "best_of = 5, .* at most 4 rows .* at least 5 "),
        ({}, {"patience": 2.0}, "patience = 2.0, but the runtime fake .*; expected 1.0"),
        ({"beam_width": 4, "beam_sizes": (1, 4)}, {"beam_size": 2}, "beam_size = 2, .* 1 or 4"),
        ({"beam_width": 4, "beam_sizes": (4,)}, {}, "beam_size = 1, which .*; expected 4"),
        ({"beam_width": 4, "beam_sizes": (1, 4)}, {"best_of": 2}, "best_of = 2, .*; expected 1"),
    ],
)
def test_a_search_that_the_runtime_cannot_do_is_refused(plan, able, option, message):
    assert plan(SEARCH, language="en", **option)
    with pytest.raises(OptionError, match=f"^{message}"):
        plan(able, language="en", **option)


def test_a_runtime_without_search_options_takes_those_that_change_nothing(plan):
    neutral = {"patience": 1, "length_penalty": 1.0, "repetition_penalty": 1.0}
    made = plan(language="en", beam_size=1, best_of=1, no_repeat_ngram_size=0, **neutral)
    assert made == plan(language="en")
    assert plan({"beam_width": 4, "beam_sizes": (1, 4)}, beam_size=4).options.beam_size == 4


def test_what_a_request_does_not_say_of_its_search_is_as_configured(plan):
    config = TranscriberConfig(beam_size=5)
    made = plan(SEARCH, config, language="en", patience=1.5, no_repeat_ngram_size=3).options
    assert (made.beam_size, made.patience, made.no_repeat_ngram_size) == (5, 1.5, 3)
    assert (made.best_of, made.length_penalty, made.repetition_penalty) == (5, 1.0, 1.0)
    made = plan(SEARCH, config, beam_size=1, best_of=4).options
    assert (made.beam_size, made.best_of) == (1, 4)
    assert plan(SEARCH | {"beam_sizes": (5,)}, config).options.best_of == 1, "it has no other"


def test_stretches_of_the_audio_are_listened_to_only_where_that_is_asked_for(plan):
    made = plan(clip_timestamps=[0, 10, 12.5])
    assert made.intervals == ((0.0, 10.0), (12.5, float("inf")))
    assert made.vad == "off"
    assert plan(clip_timestamps=(0, 10, 10, 12)).intervals == ((0.0, 10.0), (10.0, 12.0))
    assert plan(clip_timestamps=(0,), vad=True).vad == "on"
    assert plan(config=TranscriberConfig(vad="on"), clip_timestamps=(0,)).vad == "on"
    assert (plan().vad, plan().intervals) == ("auto", ())


def test_a_long_prompt_shortens_what_may_follow(plan):
    made = plan(prompt="word " * 400)
    prompt = made.texts.prompt(made.start, made.texts.before)
    assert len(prompt) + made.options.max_tokens == N_TEXT_CTX


def test_as_many_tokens_as_there_is_room_for_may_be_asked_for(plan):
    assert plan(language="en", prompt="word " * 400, max_tokens=221).options.max_tokens == 221
    grows = {"mode": "sequential", "prompt": "word " * 400}
    assert plan(language="en", max_tokens=224, **grows).options.max_tokens == 224


def test_a_plan_can_be_checked_before_the_prompt_is_tokenized(tokenizer, engine):
    """Its bounds too: they are tighter once the prompt's tokens are known."""
    request = Request(audio=b"x", prompt="word " * 400, max_tokens=224)
    made = plan_request(request, tokenizer, CAPABILITIES, TranscriberConfig(), engine.manifest)
    assert made.texts == PromptTexts()


def test_doubtful_words_are_marked_where_words_are_told_and_the_engine_can_say(plan):
    words = {"word_timestamps": True}
    made = plan({"words": True}, confidence=CONFIDENCE, low_confidence=0.5, **words)
    assert (made.confidence, made.request.low_confidence) == (CONFIDENCE, 0.5)
    made = plan({"words": True}, confidence=CONFIDENCE, **words)
    assert (made.confidence, made.request.low_confidence) == (CONFIDENCE, None)
    assert plan({"words": True}, confidence=CONFIDENCE, **words, **TRANSLATED).confidence is None
    for confidence, options, message in (
        (CONFIDENCE, {"low_confidence": 1.5}, "= 1.5; expected a number from 0 to 1"),
        (CONFIDENCE, {"low_confidence": "0.5"}, "= '0.5'; expected a number"),
        (CONFIDENCE, {"low_confidence": 0.5}, "= 0.5 needs word_timestamps = true"),
        (None, {"low_confidence": 0.5, **words}, "= 0.5, but the engine has no confidence"),
        (CONFIDENCE, {"low_confidence": 0.5, **words, **TRANSLATED}, "= 0.5, but a translation"),
    ):
        with pytest.raises(OptionError, match=f"^low_confidence {message}"):
            plan({"words": True}, confidence=confidence, **options)


def test_a_plan_says_what_was_asked(plan):
    made = plan(language="Spanish", temperature=0.5, max_tokens=7, timestamps=False)
    assert made.language == "es"
    assert made.options.temperature == 0.5
    assert made.options.max_tokens == 7
    assert made.options.timestamps is False
    made = plan(config=TranscriberConfig(temperatures=(0.2, 0.4)))
    assert made.language is None and DETECT_LANGUAGE in made.start
    assert made.options.temperature == 0.2


def test_phrases_become_a_trie_where_the_runtime_can_boost_them(plan, tokenizer):
    assert plan().options.phrases is None
    boosted = plan({"phrases": True}, phrases=("fox", "dog^2")).options.phrases
    assert boosted is trie_of(("fox", "dog^2"), tokenizer)
    with pytest.raises(OptionError, match="phrases is given, but the runtime fake cannot boost"):
        plan(phrases=("fox",))


def test_configured_phrases_are_checked_at_the_start(tokenizer):
    able = dataclasses.replace(CAPABILITIES, phrases=True)
    for phrases, capabilities, message in (
        (("fox",), CAPABILITIES, "transcriber.phrases is given, but the runtime fake cannot"),
        (("fox^9",), able, "transcriber.phrases has 'fox\\^9'; expected a weight"),
    ):
        config = TranscriberConfig(phrases=phrases)
        with pytest.raises(ConfigError, match=message):
            check_config(config, capabilities, tokenizer)
