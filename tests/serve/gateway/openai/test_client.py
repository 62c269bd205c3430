"""The gateway by OpenAI's own client, which checks every answer against its types."""

import asyncio
import errno
import json

import openai
import pytest
from openai.types import audio

from serve.gateway.openai import form as forms
from serve.speech import raw
from serve.wire import uploads
from tests.gateways import FORM, TRANSCRIPTIONS, WAIT_S, form, until

SOUND = b"RIFF and so on"
FILE = ("a.wav", SOUND)
VOICE = "data:audio/wav;base64,UklGRg=="
SRT = """\
1
00:00:00,000 --> 00:00:02,000
one two
"""


def transcribe(client, prompt="one two", **options):
    options = {"model": "whisper-1", "file": FILE, "prompt": prompt, **options}
    return client.audio.transcriptions.create(**options)


# ---------------------------------------------------------------- formats


def test_json(client):
    answer = transcribe(client)
    assert type(answer) is audio.Transcription
    assert (answer.text, answer.usage.type, answer.usage.seconds) == ("one two", "duration", 1.5)


def test_log_probabilities(client):
    answer = transcribe(client, "uno dós", include=["logprobs"])
    assert [(one.token, one.logprob) for one in answer.logprobs] == [(" uno", -0.5), (" dós", -1.5)]
    assert [bytes(map(int, one.bytes)).decode() for one in answer.logprobs] == [" uno", " dós"]
    *deltas, done = transcribe(client, "uno dós", include=["logprobs"], stream=True)
    assert [[one.token for one in event.logprobs] for event in deltas] == [[" uno"], [" dós"]]
    assert [one.logprob for one in done.logprobs] == [-0.5, -1.5]
    assert transcribe(client).logprobs is None


def test_verbose_json(client):
    answer = transcribe(client, response_format="verbose_json")
    assert type(answer) is audio.TranscriptionVerbose
    assert (answer.text, answer.language, answer.duration) == ("one two", "spanish", 1.5)
    assert answer.words is None
    first, second = answer.segments
    assert (first.id, first.text, first.tokens, first.seek) == (0, " one", [0], 0)
    assert (second.id, second.start, second.end, second.seek) == (1, 1.0, 2.0, 100)
    assert (second.avg_logprob, second.no_speech_prob) == (-0.25, 0.125)


def test_diarized_json(shared, client):
    """Speakers are told apart without a word of ours; names and references go along."""
    known = {"known_speaker_names": ["Doe, Ann"], "known_speaker_references": [VOICE]}
    answer = transcribe(
        client, response_format="diarized_json", chunking_strategy="auto", extra_body=known
    )
    assert type(answer) is audio.TranscriptionDiarized
    assert (answer.task, answer.text, answer.duration) == ("transcribe", "one two", 1.5)
    first, second = answer.segments
    assert (first.id, first.start, first.end, first.text, first.speaker) == (
        *("seg_0", 0.0, 1.0),
        *("one", "A"),
    )
    assert (second.speaker, second.type) == ("B", "transcript.text.segment")
    assert answer.usage.seconds == 1.5
    asked = shared.triton.inputs[-1]
    assert asked["DIARIZE"] is True
    assert asked["KNOWN_SPEAKER_NAMES"] == "Doe, Ann"
    assert asked["KNOWN_SPEAKER_REFERENCES"] == VOICE


def test_diarized_json_as_events(client):
    events = list(transcribe(client, stream=True, response_format="diarized_json"))
    assert [event.type.rpartition(".")[2] for event in events] == [
        *("delta", "segment", "delta", "segment", "done")
    ]
    assert [event.segment_id for event in events[0:4:2]] == ["seg_0", "seg_1"]
    segments = events[1:4:2]
    assert all(type(event) is audio.TranscriptionTextSegmentEvent for event in segments)
    assert [(event.id, event.text, event.speaker) for event in segments] == [
        ("seg_0", "one", "A"),
        ("seg_1", "two", "B"),
    ]


def test_other_formats_say_who_speaks_if_that_is_asked_for(client):
    ask = {"extra_body": {"diarize": True, "num_speakers": 2}}
    assert transcribe(client, response_format="text", **ask) == "A: one\nB: two\n"
    assert "\nB: two\n" in transcribe(client, response_format="srt", **ask)
    assert "\n<v B>two</v>\n" in transcribe(client, response_format="vtt", **ask)
    times = {"timestamp_granularities": ["word", "segment"]}
    answer = transcribe(client, response_format="verbose_json", **times, **ask)
    assert [segment.speaker for segment in answer.segments] == ["A", "B"]
    assert [word.speaker for word in answer.words] == ["A", "B"]


def test_words_with_and_without_segments(client):
    ask = {"response_format": "verbose_json"}
    answer = transcribe(client, timestamp_granularities=["word"], **ask)
    assert answer.segments is None
    assert [(word.word, word.start, word.end) for word in answer.words] == [
        ("one", 0.0, 0.5),
        ("two", 1.0, 1.5),
    ]
    answer = transcribe(client, timestamp_granularities=["word", "segment"], **ask)
    assert (len(answer.segments), len(answer.words)) == (2, 2)


def test_words_say_how_likely_they_are_right_where_that_is_known(shared, client):
    words = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    low = {"extra_body": {"low_confidence": 0.5}}
    answer = transcribe(client, prompt="one clear mumbled", **words, **low)
    found = [(one.word, one.probability, one.model_extra.get("confidence")) for one in answer.words]
    assert found == [("one", 0.75, None), ("clear", 0.75, 0.9), ("mumbled", 0.75, 0.254)]
    assert shared.triton.inputs[-1]["LOW_CONFIDENCE"] == 0.5


def test_text_and_subtitles(shared, client):
    assert transcribe(client, response_format="text") == "one two\n"
    assert transcribe(client, response_format="srt") == SRT
    assert shared.triton.inputs[-1]["TRY_WORD_TIMESTAMPS"]
    vtt = transcribe(client, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.000\none two\n")
    lines = {"max_line_width": 5, "max_line_count": 2}
    assert "one\ntwo\n" in transcribe(client, response_format="srt", extra_body=lines)
    by_words = transcribe(client, response_format="srt", extra_body={"max_words_per_line": 1})
    assert "00:00:01,000 --> 00:00:01,500\ntwo" in by_words


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # as OpenAI has it
def test_translations_are_in_english(shared, client):
    create = client.audio.translations.create
    answer = create(model="whisper-1", file=FILE, prompt="one two")
    assert (type(answer), answer.text) == (audio.Translation, "one two")
    assert shared.triton.inputs[-1]["TASK"] == "translate"
    verbose = create(model="whisper-1", file=FILE, response_format="verbose_json")
    assert verbose.language == "english"
    assert create(model="whisper-1", file=FILE, prompt="one two", response_format="srt") == SRT


def test_every_option_reaches_the_model(shared, client):
    transcribe(
        client,
        "¿Qué?",
        language="es",
        temperature=0.4,
        chunking_strategy={"type": "server_vad", "threshold": 0.75},
        extra_body={"beam_size": 5, "length_penalty": 0.5, "keywords": ["Zoë", "oboe"]},
    )
    found = shared.triton.inputs[-1]
    assert found.pop("TEMPERATURE") == pytest.approx(0.4)
    assert found == {
        "AUDIO": SOUND,
        "PROMPT": "¿Qué?",
        "LANGUAGE": "es",
        "VAD": "on",
        "VAD_THRESHOLD": 0.75,
        "BEAM_SIZE": 5,
        "LENGTH_PENALTY": 0.5,
        "HOTWORDS": "Zoë, oboe",
    }
    transcribe(client, chunking_strategy="auto", stream=False)
    assert shared.triton.inputs[-1].keys() == {"AUDIO", "PROMPT"}


@pytest.mark.parametrize("size", [1000, 2**21])
def test_raw_samples_get_the_header_that_they_lack(shared, client, size):
    """By the type of the form's part, which every client can set."""
    samples, kind = bytes(range(250)) * (size // 250), "audio/L16; rate=16000"
    transcribe(client, file=("a.pcm", samples, kind))
    found = shared.triton.inputs[-1].get("AUDIO") or list(shared.triton.files.values())[-1][:]
    assert found == raw.header(kind, len(samples)) + samples
    with pytest.raises(openai.BadRequestError, match="audio's type has rate = 'fast'") as refused:
        transcribe(client, file=("a.pcm", samples, "audio/L16; rate=fast"))
    assert refused.value.param == "file"


@pytest.mark.parametrize(
    ("place", "name"),
    [(forms.tempfile, "NamedTemporaryFile"), (forms._Spool, "flush"), (uploads.os, "link")],
)
def test_without_room_for_a_file_nothing_stays(shared, client, monkeypatch, place, name):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place, name, full)
    with pytest.raises(openai.InternalServerError, match="no room for the file") as caught:
        transcribe(client, file=("a.wav", b"RIFF" * 2**19))
    assert caught.value.status_code == 503
    assert list(uploads.folder_of(shared.folder, 0).iterdir()) == []


@pytest.mark.parametrize("name", ["gpt-4o-transcribe-diarize", "Systran/faster-whisper-base"])
def test_names_that_known_clients_send(client, name):
    stream = transcribe(client.with_raw_response, model=name, stream=True)
    assert stream.headers["x-earshot-model"] == "demo"
    assert [event.type for event in stream.parse()][-1] == "transcript.text.done"
    assert client.models.retrieve(name).id == name


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo", "whisper-1"]
    assert client.models.retrieve("whisper-1").id == "whisper-1"
    for name in ("gpt-5", f"whisper-{'a' * 200}"):
        with pytest.raises(openai.NotFoundError, match="there are demo, whisper-1, gpt-"):
            client.models.retrieve(name)


def test_what_is_there_of_cut_audio_comes_with_a_warning(client):
    """In its body where that has room for it, and in a header of any answer that is no stream."""
    partial = {"extra_body": {"partial": True}}
    for format in ("json", "text", "srt"):
        answer = transcribe(client.with_raw_response, response_format=format, **partial)
        assert answer.headers["x-earshot-warning"] == "audio is cut short: 1.50 s%0A"
    verbose = transcribe(client, response_format="verbose_json", **partial)
    assert verbose.warnings == ["audio is cut short: 1.50 s\n"]
    *_, done = transcribe(client, stream=True, **partial)
    assert done.warnings == verbose.warnings
    whole = transcribe(client.with_raw_response)
    assert "x-earshot-warning" not in whole.headers


# ---------------------------------------------------------------- streams


def test_a_stream_has_a_delta_for_each_segment(shared, client):
    *deltas, done = transcribe(client, stream=True)
    assert 'first_delta_seconds_count{route="transcriptions"}' in shared.page()
    assert [(event.type, event.delta) for event in deltas] == [
        ("transcript.text.delta", "one"),
        ("transcript.text.delta", " two"),
    ]
    assert (done.type, done.text) == ("transcript.text.done", "one two")
    usage = done.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (75, 2, 77)


def test_a_verbose_stream_has_the_segments_and_words_of_the_whole_answer(client):
    ask = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    whole = transcribe(client, **ask).model_dump()
    *deltas, done = transcribe(client, stream=True, **ask)
    assert [event.segment for event in deltas] == whole["segments"]
    assert [word for event in deltas for word in event.words] == whole["words"]
    assert [event.delta for event in deltas] == ["one", " two"]
    for name in ("text", "language", "duration"):
        assert getattr(done, name) == whole[name]
    (only, _) = transcribe(client, "one", stream=True, response_format="verbose_json")
    assert (only.segment["text"], hasattr(only, "words")) == (" one", False)


def test_a_segment_comes_while_the_next_is_decoded(shared, client):
    with transcribe(client, "wait for it", stream=True) as events:
        assert next(events).delta == "wait"
        until(lambda: shared.triton.waiting)
        shared.triton.release()
        assert next(events).text == "wait for it"


# ---------------------------------------------------------------- errors


WRONG_OPTION = "error:OptionError: the request: beam_size = 9; expected at most 8"
WRONG_AUDIO = "error:AudioError: audio of 9 bytes is no audio file known here"
FAULT = "error:INTERNAL EarshotError: /home/a"


@pytest.mark.parametrize(
    ("options", "kind", "param", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model", "model_not_found"),
        ({"extra_body": {"beem_size": 5}}, openai.BadRequestError, "beem_size", None),
        ({"file": ("a.wav", b"")}, openai.BadRequestError, "file", None),
        ({"prompt": WRONG_OPTION}, openai.BadRequestError, "beam_size", "invalid_value"),
        ({"prompt": WRONG_AUDIO}, openai.BadRequestError, "file", "invalid_audio"),
        ({"prompt": FAULT}, openai.InternalServerError, None, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openais(client, options, kind, param, code, stream):
    with pytest.raises(kind) as caught:
        transcribe(client, stream=stream, **options)
    error = caught.value
    assert type(error) is kind
    assert error.param == param
    assert error.code == code or code is None
    assert error.request_id.startswith("req_")
    assert error.message and "/home" not in error.message


def test_an_error_within_a_stream_is_its_last_event(client):
    events = transcribe(client, "late:DeviceError: it failed", stream=True)
    assert next(events).delta == "late:DeviceError:"
    with pytest.raises(openai.APIError) as caught:
        next(events)
    assert caught.value.code == "server_error"
    assert "failed" in caught.value.message


# ---------------------------------------------------------------- clients that go


def test_a_client_that_goes_frees_its_place(shared, client_of):
    """Those who wait for an answer, and those in the middle of a stream."""
    before = len(shared.triton.cancelled)

    async def run():
        async with client_of(shared, kind=openai.AsyncOpenAI) as client:
            asked = asyncio.create_task(transcribe(client, "wait"))
            stream = await transcribe(client, "wait for it", stream=True)
            assert (await anext(stream)).delta == "wait"
            while len(shared.triton.waiting) < 2:
                await asyncio.sleep(0.01)
            asked.cancel()
            await stream.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    until(lambda: len(shared.triton.cancelled) == before + 2)
    until(lambda: shared.services.admission.requests == 0)
    assert sorted(shared.triton.ended) == sorted(shared.triton.requests)


def test_open_webui(shared):
    """The form's file has no type and comes in chunks; a key that is not set is empty."""
    for key, fields in (
        ("", {"model": "whisper-1"}),
        ("sk-x", {"model": "", "language": "es"}),
        ("sk-x", {"model": "gpt-4o-transcribe"}),
    ):
        body = form(SOUND, "6f1c.webm", **fields)
        pieces = (body[begin : begin + 5] for begin in range(0, len(body), 5))
        headers = {**FORM, "Authorization": f"Bearer {key}"}
        status, _, answer = shared.ask("POST", TRANSCRIPTIONS, pieces, headers)
        assert (status, json.loads(answer)["text"]) == (200, "hello")
        assert shared.triton.inputs[-1]["AUDIO"] == SOUND


def test_silence_has_no_languages(shared, client):
    answer = transcribe(client, "silence", model="gpt-transcribe")
    assert answer.languages == []
    assert json.loads(answer.to_json())["text"] == ""
