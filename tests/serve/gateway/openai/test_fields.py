"""What forms may say."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.messages import Request, Segment
from serve.gateway.errors import ApiError
from serve.gateway.openai.answers import added_text, render_transcript
from serve.gateway.openai.fields import FIELDS, read_fields
from serve.speech.windows import join_text
from tests.fakes import transcript

VERBOSE = ("response_format", "verbose_json")
WORD = ("timestamp_granularities[]", "word")
SRT = ("response_format", "srt")
SERVER_VAD = ("chunking_strategy[type]", "server_vad")
PADDING = ("chunking_strategy[prefix_padding_ms]", "300.0")


def read(*pairs, task="transcribe"):
    return read_fields(pairs, task)


def refused(*pairs):
    """Field and message of a refusal."""
    with pytest.raises(ApiError) as caught:
        read(*pairs)
    return getattr(caught.value, "param", None), str(caught.value)


def test_a_form_that_says_nothing_asks_for_the_default():
    asked = read()
    assert asked.request == Request(b"")
    assert (asked.model, asked.format, asked.stream) == (None, "json", False)


def test_each_option_of_ours_is_a_field():
    not_fields = {"audio", "sample_rate", "task"}
    not_fields |= {"word_timestamps", "try_word_timestamps", "token_logprobs"}
    not_fields |= {"voice", "unfinished"}  # of live text
    assert {field.name for field in dataclasses.fields(Request)} - not_fields <= FIELDS.keys()


def test_an_empty_field_says_nothing():
    assert read(("language", ""), ("temperature", ""), ("model", "")) == read()


@pytest.mark.parametrize(
    ("pairs", "options"),
    [
        # Phrases stand between commas or come one by one.
        ([("phrases", "Ann^2, Levin")], {"phrases": ("Ann^2", "Levin")}),
        ([("phrases[]", "Levin, K."), ("phrases[]", "Ann")], {"phrases": ("Levin, K.", "Ann")}),
        ([("languages[]", "en"), ("languages[]", "German")], {"languages": ("en", "German")}),
        ([("languages", "en, German")], {"languages": ("en", "German")}),
        (
            [("keywords[]", "Zoë"), ("hotwords", "oboe, viola"), ("keywords[]", "Ann")],
            {"hotwords": "oboe, viola, Zoë, Ann"},
        ),
        # A temperature of 0 rises by itself, as OpenAI's does.
        *(([("temperature", text)], {}) for text in ("0", "0.0")),
        ([("temperature", "0.2")], {"temperature": 0.2}),
        # Voice activity: on, off, or as configured.
        *(([("vad", text)], {"vad": "on"}) for text in ("on", "True", "1")),
        *(([("vad", text)], {"vad": "off"}) for text in ("off", "0")),
        ([("vad", "auto")], {"vad": "auto"}),
        ([("chunking_strategy", "auto")], {}),
        ([("chunking_strategy", "auto"), ("vad", "false")], {"vad": "off"}),
        ([("chunking_strategy", '{"type": "server_vad"}')], {"vad": "on"}),
        ([SERVER_VAD], {"vad": "on"}),
        (
            [("chunking_strategy", '{"type": "server_vad", "silence_duration_ms": 500}')],
            {"vad": "on", "vad_min_silence_s": 0.5},
        ),
        ([SERVER_VAD, PADDING], {"vad": "on", "vad_pad_s": 0.3}),
        ([SERVER_VAD, ("chunking_strategy[threshold]", ".7")], {"vad": "on", "vad_threshold": 0.7}),
        ([("vad", "true"), ("vad_pad_s", "0.3")], {"vad": "on", "vad_pad_s": 0.3}),
    ],
)
def test_fields_become_options(pairs, options):
    assert read(*pairs).request == Request(b"", **options)


@pytest.mark.parametrize("name", ["langauge", "model[]", "task"])
def test_misspelled_fields_are_refused_although_unknown_ones_are_ignored(name):
    with pytest.raises(ApiError, match=name.partition("[")[0]):
        read_fields([(name, "1")], "transcribe")


def test_unknown_fields_are_refused_where_that_is_configured():
    with pytest.raises(ApiError, match="unknown field 'user'"):
        read_fields([("user", "u")], "transcribe", "refuse")


@pytest.mark.parametrize(
    "pairs",
    [
        [("timestamp_granularities", "word,segment")],
        [("timestamp_granularities[]", '["word", "segment"]')],
        [("timestamp_granularities[0]", "word"), ("timestamp_granularities[1]", "segment")],
    ],
)
def test_lists_may_be_spelled_in_several_ways(pairs):
    asked = read(VERBOSE, *pairs)
    assert (asked.words, asked.segments, asked.ignored) == (True, True, ())


@pytest.mark.parametrize(
    ("pairs", "field", "told"),
    [
        ([("beem_size", "5")], "beem_size", "did you mean 'beam_size'"),
        ([("vad", "much")], "vad", "expected auto, on, off, true or false"),
        ([("model", "a"), ("model", "b")], "model", "came 2 times"),
        ([("beam_size", "five")], "beam_size", "a whole number"),
        ([("beam_size", "9" * 5000)], "beam_size", "a whole number"),
        ([("temperature", "nan")], "temperature", "a number"),
        ([("stream", "maybe")], "stream", "true or false"),
        ([VERBOSE, ("include", "logprobs")], "include", "expected json"),
        ([("token_logprobs", "true")], "token_logprobs", "include[]=logprobs"),
        ([("task", "translate")], "task", "/v1/audio/translations"),
        ([("word_timestamps", "true")], "word_timestamps", "timestamp_granularities[]=word"),
        ([WORD], "timestamp_granularities", "expected verbose_json"),
        ([VERBOSE, ("timestamp_granularities[]", "a")], "timestamp_granularities", "segment"),
        ([SRT, ("stream", "true")], "stream", "expected json, text, verbose"),
        ([("max_words_per_line", "3")], "max_words_per_line", "srt, vtt"),
        ([VERBOSE, ("low_confidence", "0.5")], "low_confidence", "granularities[]=word"),
        ([SRT, ("max_line_width", "1")], "max_line_width", "2 to 1000"),
        ([("try_word_timestamps", "1")], "try_word_timestamps", "by themselves"),
        ([("chunking_strategy", "sometimes")], "chunking_strategy", '"auto"'),
        ([("chunking_strategy", "[" * 100_000)], "chunking_strategy", "recursion"),
        ([("chunking_strategy[threshold]", "0.5")], "chunking_strategy", "type is missing"),
        ([("vad_pad_s", "1"), SERVER_VAD, PADDING], "vad_pad_s", "says otherwise"),
        ([("chunking_strategy", "auto"), SERVER_VAD], "chunking_strategy", "came 2 times"),
        ([("vad", "0"), SERVER_VAD], "vad", "one of them"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(pairs, field, told):
    found, message = refused(*pairs)
    assert found == field
    assert told in message
    assert len(message) < 100 + len(", ".join(FIELDS))


@settings(derandomize=True, deadline=None, database=None)
@given(st.lists(st.text(alphabet="ab \n\u3000", max_size=5), max_size=6))
def test_deltas_join_to_the_whole_text(texts):
    deltas = [added_text("".join(texts[:i]), text) for i, text in enumerate(texts)]
    segments = [Segment(0.0, 1.0, text, (), None, None, 0.0, 1.0) for text in texts]
    assert "".join(deltas) == join_text(segments)


def test_json_names_every_language_that_was_heard():
    answer = transcript(" Hallo.", " Hello.", " Tag.")
    segments = [
        dataclasses.replace(segment, language=code)
        for segment, code in zip(answer.segments, ("de", "en", "de"), strict=True)
    ]
    answer = dataclasses.replace(answer, language="de", segments=tuple(segments))
    text, _ = render_transcript(answer, read_fields([("model", "whisper")], "transcribe"))
    assert json.loads(text)["languages"] == [{"code": "de"}, {"code": "en"}]
