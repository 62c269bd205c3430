"""What a client may set, and the events that it may send."""

import pytest

from serve.gateway.live import events
from serve.gateway.live.events import EventError
from serve.gateway.live.settings import SettingError, Settings, as_session, updated


def input_of(**input):
    return {"audio": {"input": input}}


def test_an_update_changes_what_it_names_and_nothing_else():
    first = updated(Settings(), input_of(turn_detection={"threshold": 0.7}))
    second = updated(first, input_of(transcription={"model": "whisper-1", "language": "German"}))
    assert second.input.turn_detection.threshold == 0.7
    assert second.input.turn_detection.silence_duration_ms == 500
    assert second.input.transcription.language == "German"
    third = updated(second, input_of(turn_detection=None, format={"type": "audio/pcmu"}))
    assert third.input.turn_detection is None
    assert as_session(third)["audio"]["input"]["format"] == {"type": "audio/pcmu"}
    again = updated(third, input_of(turn_detection={"type": "server_vad"}))
    assert again.input.turn_detection == Settings().input.turn_detection


def test_what_asks_for_nothing_is_taken():
    vad = {"type": "server_vad", "create_response": False, "interrupt_response": None}
    transcription = {"model": None, "delay": None, "keywords": None, "prompt": None}
    changes = input_of(noise_reduction=None, turn_detection=vad, transcription=transcription)
    assert updated(Settings(), {"type": "transcription", "include": [], **changes}) == Settings()
    assert updated(Settings(), {}) == Settings()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"type": "realtime"}, "type"),
        ({"include": ["earshot.hypothesis", "logprobs"]}, "include"),
        ({"include": ["item.input_audio_transcription.logprobs"]}, "include"),
        (input_of(noise_reduction={"type": "near_field"}), "audio.input.noise_reduction"),
        (input_of(turn_detection={"type": "semantic_vad"}), "audio.input.turn_detection.type"),
        (
            input_of(turn_detection={"idle_timeout_ms": 5000}),
            "audio.input.turn_detection.idle_timeout_ms",
        ),
        (input_of(transcription=None), "audio.input.transcription"),
        (input_of(transcription={"delay": "low"}), "audio.input.transcription.delay"),
        (input_of(transcription={"keywords": ["x"]}), "audio.input.transcription.keywords"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes, param):
    with pytest.raises(SettingError, match=f"session.{param} = ") as refused:
        updated(Settings(), changes)
    assert (refused.value.param, refused.value.code) == (f"session.{param}", "unsupported_value")


def test_languages_are_also_those_of_locales():
    for language in ("en-US", "auto"):
        found = updated(Settings(), input_of(transcription={"language": language}))
        assert found.input.transcription.language == language
    asked = {"language": "auto", "languages": ["de-DE", "en"]}
    assert updated(Settings(), input_of(transcription=asked)).input.transcription.languages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"voice": "alloy"}, "unknown key 'voice'"),
        (input_of(speed=2), "unknown key 'speed'"),
        (input_of(format={"type": "audio/mp3"}), "format.type = 'audio/mp3'; expected"),
        (input_of(format={"type": "audio/pcm", "rate": 16000}), "rate = 16000; expected 24000"),
        (input_of(format={"type": "audio/pcma", "rate": 24000}), "G.711 has 8 kHz"),
        (input_of(turn_detection={"threshold": 1.5}), "threshold = 1.5; expected less than 1"),
        (input_of(turn_detection={"silence_duration_ms": -1}), "silence_duration_ms = -1"),
        (input_of(transcription={"language": "elvish"}), "language = 'elvish'; expected a code"),
        (input_of(transcription={"language": "xx-US"}), "language = 'xx-US'; expected a code"),
        (input_of(transcription={"languages": ["en", "elvish"]}), "'elvish'; expected a code"),
        (
            input_of(transcription={"languages": ["en"], "language": "de"}),
            "transcription.languages came beside language; expected one",
        ),
        (input_of(transcription="whisper-1"), "transcription = 'whisper-1'; expected a table"),
        ({"audio": 3}, "audio = 3; expected a table"),
    ],
)
def test_what_is_wrong_is_refused_with_what_was_expected(changes, message):
    with pytest.raises(SettingError, match=message):
        updated(Settings(), changes)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", "invalid_json", "not JSON"),
        ("[" * 100_000, "invalid_json", "not JSON"),
        ("[1]", "invalid_event", "expected an object"),
        ('{"a": 1}', "invalid_value", "type = None; a transcription session takes"),
        ('{"type": "response.create"}', "invalid_value", "type = 'response.create'"),
        ('{"type": {"a": 1}}', "invalid_value", "type = {'a': 1}"),
        ('{"type": "input_audio_buffer.append"}', "missing_required_parameter", "audio is missing"),
        ('{"type": "input_audio_buffer.clear", "x": 1}', "unknown_parameter", "unknown key 'x'"),
        ('{"type": "input_audio_buffer.clear", "event_id": 1}', "invalid_value", "event_id = 1"),
        ('{"type": "input_audio_buffer.clear", "event_id": "\\ud800"}', "invalid_json", "not JSON"),
        ('{"type": ' + "[" * 900 + "]" * 900 + "}", "invalid_json", "not JSON"),
        (
            '{"type": "session.update", "session": {"x": "' + "y" * 100_000 + '"}}',
            "invalid_event",
            "characters; expected at most 100000",
        ),
    ],
)
def test_what_is_no_event_is_refused(text, code, message):
    with pytest.raises(EventError, match=message) as refused:
        events.read_event(text)
    assert refused.value.code == code and len(str(refused.value)) < 400


def test_what_is_long_and_no_audio_is_refused_before_it_is_read(monkeypatch):
    audio = '{"type": "input_audio_buffer.append", "audio": "' + "A" * 1_000_000 + '"}'
    assert events.read_event(audio).type == "input_audio_buffer.append"
    monkeypatch.setattr(events, "pydantic_core", None)
    keys = ",".join(f'"k{number}":1' for number in range(20_000))
    with pytest.raises(EventError, match="expected at most 100000, but for input_audio_buffer"):
        events.read_event('{"type": "session.update", "session": {' + keys + "}}")


def test_a_refused_event_is_told_by_its_id():
    with pytest.raises(EventError) as refused:
        events.read_event('{"type": "response.create", "event_id": "mine"}')
    assert refused.value.event_id == "mine"


@pytest.mark.parametrize("audio", ["AAA", "A\nAA=", "ÄÄÄÄ", "AA==", 7, None])
def test_audio_must_be_base64_of_whole_samples(audio):
    with pytest.raises(EventError, match="audio") as refused:
        events.read_audio(audio, 2)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "audio")
