"""Plans: which options are refused, by name, and what the others become."""

import dataclasses

import numpy as np
import pytest

from serve.config import TranscriberConfig
from serve.engine import DETECT_LANGUAGE
from serve.errors import AudioError, OptionError
from serve.messages import Request
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.plan import plan_request
from tests.fakes import CAPABILITIES, fake_engine

N_TEXT_CTX = 448
SECOND = np.zeros(16_000, np.float32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(fake_engine(tmp_path_factory.mktemp("engine")))


@pytest.fixture
def plan(tokenizer):
    def plan(lacks=None, config=None, **options):
        request = Request(**{"audio": SECOND, "sample_rate": 16_000, **options})
        capabilities = dataclasses.replace(CAPABILITIES, **lacks or {})
        config = config or TranscriberConfig()
        return plan_request(request, tokenizer, capabilities, config, N_TEXT_CTX)

    return plan


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 225}, "max_tokens = 225; expected at most 224"),
        ({"max_tokens": 224, "prompt": "word " * 400}, "the prompt leaves room for 221"),
        ({"language": "xx"}, "language"),
        ({"task": "summarise"}, "task"),
        ({"sample_rate": None}, "sample_rate"),
        ({"audio": b"RIFF"}, "sample_rate"),
    ],
)
def test_wrong_options_are_refused_by_name(plan, options, name):
    with pytest.raises(OptionError, match=name):
        plan(**{"language": "en", **options})


@pytest.mark.parametrize("audio", [[0.0, 0.1], "a.wav", None])
def test_audio_of_a_wrong_type_is_refused(plan, audio):
    with pytest.raises(AudioError, match=type(audio).__name__):
        plan(audio=audio)


@pytest.mark.parametrize(
    ("lacks", "options", "name"),
    [
        ({"sampling": False}, {"temperature": 0.5}, "temperature"),
        ({"timestamps": False}, {}, "timestamps"),
        ({"detect_language": False}, {"language": None}, "language"),
    ],
)
def test_what_the_runtime_cannot_do_is_refused(plan, lacks, options, name):
    options = {"language": "en", **options}
    assert plan(**options)
    with pytest.raises(OptionError, match=f"{name}.*fake"):
        plan(lacks, **options)


def test_a_long_prompt_shortens_what_may_follow(plan):
    made = plan(prompt="word " * 400)
    assert len(made.prompt) + made.options.max_tokens == N_TEXT_CTX


def test_as_many_tokens_as_there_is_room_for_may_be_asked_for(plan):
    assert plan(language="en", prompt="word " * 400, max_tokens=221).options.max_tokens == 221
    assert plan(language="en", max_tokens=224).options.max_tokens == 224
    assert plan(language="en", max_tokens=1).options.max_tokens == 1


@pytest.mark.parametrize("temperature", [0, 0.0, 1, 1.0])
def test_temperatures_reach_from_0_to_1(plan, temperature):
    assert plan(language="en", temperature=temperature).options.temperature == temperature


def test_a_greedy_runtime_takes_the_temperature_0(plan):
    made = plan({"sampling": False}, language="en", temperature=0.0)
    assert (made.options.temperature, made.fixed_temperature) == (0.0, True)


def test_a_plan_says_what_was_asked(plan):
    made = plan(language="Spanish", temperature=0.5, max_tokens=7, timestamps=False)
    assert (made.language, made.fixed_temperature) == ("es", True)
    assert made.options.temperature == 0.5
    assert made.options.max_tokens == 7
    assert made.options.timestamps is False
    made = plan(config=TranscriberConfig(temperatures=(0.2, 0.4)))
    assert (made.language, made.fixed_temperature) == (None, False)
    assert DETECT_LANGUAGE in made.prompt
    assert made.options.temperature == 0.2
