"""What a client may set, and the events that it may send."""

import base64
import dataclasses

import pytest

from serve.gateway.live import events
from serve.gateway.live.settings import EventError, ServerVad, SessionSettings, as_session
from serve.gateway.live.settings import updated as updated_and_warned

LOGPROBS = "item.input_audio_transcription.logprobs"


def input_of(**input):
    return {"audio": {"input": input}}


def updated(settings, changes):
    """Without a warning."""
    after, warnings = updated_and_warned(settings, changes)
    assert warnings == []
    return after


def test_an_update_changes_what_it_names_and_nothing_else():
    first = updated(SessionSettings(), input_of(turn_detection={"threshold": 0.7}))
    second = updated(first, input_of(transcription={"model": "whisper-1", "language": "German"}))
    assert second.input.turn_detection.threshold == 0.7
    assert second.input.turn_detection.silence_duration_ms == 500
    assert second.input.transcription.language == "German"
    third = updated(second, input_of(turn_detection=None, format={"type": "audio/pcmu"}))
    assert third.input.turn_detection is None
    assert as_session(third)["audio"]["input"]["format"] == {"type": "audio/pcmu"}
    again = updated(third, input_of(turn_detection={"type": "server_vad"}))
    assert again.input.turn_detection == SessionSettings().input.turn_detection


def test_what_asks_for_nothing_is_taken():
    vad = {"type": "server_vad", "create_response": False, "interrupt_response": None}
    transcription = {"model": None, "delay": None, "keywords": None, "prompt": None}
    changes = input_of(noise_reduction=None, turn_detection=vad, transcription=transcription)
    assert (
        updated(SessionSettings(), {"type": "transcription", "include": [], **changes})
        == SessionSettings()
    )
    assert updated(SessionSettings(), {}) == SessionSettings()


@pytest.mark.parametrize(
    ("changes", "params"),
    [
        ({"include": ["earshot.hypothesis", LOGPROBS]}, ["include"]),
        (input_of(noise_reduction={"type": "near_field"}), ["audio.input.noise_reduction"]),
        (
            input_of(turn_detection={"type": "semantic_vad", "eagerness": "low"}),
            ["audio.input.turn_detection.type", "audio.input.turn_detection.eagerness"],
        ),
        (
            input_of(turn_detection={"idle_timeout_ms": 5000, "create_response": True}),
            [f"audio.input.turn_detection.{x}" for x in ("create_response", "idle_timeout_ms")],
        ),
        (input_of(transcription=None), ["audio.input.transcription"]),
    ],
)
def test_what_has_no_effect_is_taken_with_a_warning(changes, params):
    after, warnings = updated_and_warned(SessionSettings(), changes)
    include = ("earshot.hypothesis",) if "include" in changes else ()
    assert after == dataclasses.replace(SessionSettings(), include=include)
    assert [one["param"] for one in warnings] == [f"session.{param}" for param in params]
    for one in warnings:
        assert one["message"].startswith(f"{one['param']} = ")
        assert one["message"].endswith(" has no effect")


def test_what_is_ignored_beside_what_is_wrong_changes_nothing_of_the_clients_own():
    changes = input_of(turn_detection={"type": "semantic_vad", "threshold": 7})
    with pytest.raises(EventError, match="threshold = 7; expected"):
        updated(SessionSettings(), changes)
    assert changes == input_of(turn_detection={"type": "semantic_vad", "threshold": 7})
    with pytest.raises(EventError, match="type = 'none'; expected"):
        updated(SessionSettings(), input_of(turn_detection={"type": "none"}))
    with pytest.raises(EventError, match="include"):
        updated(SessionSettings(), {"include": ["speakers"]})


def test_languages_are_also_those_of_locales():
    for language in ("en-US", "auto"):
        found = updated(SessionSettings(), input_of(transcription={"language": language}))
        assert found.input.transcription.language == language
    asked = {"language": "auto", "languages": ["de-DE", "en"]}
    assert updated(SessionSettings(), input_of(transcription=asked)).input.transcription.languages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": {"type": "audio/mp3"}}, "format.type = 'audio/mp3'; expected"),
        ({"format": {"type": "audio/pcm", "rate": 8000}}, "rate = 8000; expected 16000 or 24000"),
        ({"format": {"type": "audio/pcma", "rate": 24000}}, "G.711 has 8 kHz"),
        ({"turn_detection": {"threshold": 1.5}}, "threshold = 1.5; expected at most 1"),
        ({"transcription": {"delay": "short"}}, "delay = 'short'; expected 'minimal', 'low'"),
        ({"transcription": {"language": "elvish"}}, "language = 'elvish'; expected a code"),
        ({"transcription": {"languages": ["en", "elvish"]}}, "'elvish'; expected a code"),
        ({"transcription": {"languages": ["en"], "language": "de"}}, "languages came beside"),
        ({"transcription": "whisper-1"}, "transcription = 'whisper-1'; expected a table"),
    ],
)
def test_what_is_wrong_is_refused_with_what_was_expected(changes, message):
    with pytest.raises(EventError, match=message) as refused:
        updated(SessionSettings(), input_of(**changes))
    assert refused.value.status.code == "invalid_value"
    assert refused.value.param.startswith("session.audio") and "=" not in refused.value.param


def test_unknown_keys_have_no_effect_and_one_warning():
    changes = {
        "voice": "alloy",
        "tools": [],
        **input_of(
            speed=2,
            format={"type": "audio/pcm", "rate": 24000, "channels": 1},
            transcription={"language": "de", "promt": "x"},
            turn_detection={"type": "server_vad", "foo": {"bar": 1}},
        ),
    }
    after, (warning,) = updated_and_warned(SessionSettings(), changes)
    assert after == updated(SessionSettings(), input_of(transcription={"language": "de"}))
    assert set(warning["param"].split(", ")) == {
        *("session.voice", "session.tools", "session.audio.input.speed"),
        "session.audio.input.format.channels",
        "session.audio.input.transcription.promt",
        "session.audio.input.turn_detection.foo",
    }
    assert "transcription.promt (did you mean prompt?)" in warning["message"]
    many = {f"{number}{'k' * 1000}": 1 for number in range(1000)}
    _, (warning,) = updated_and_warned(SessionSettings(), many)
    assert "and 980 more" in warning["message"] and len(str(warning)) < 4000


@pytest.mark.parametrize("threshold", [0, 1, 1.0])
def test_numbers_may_have_a_point_and_a_threshold_be_at_either_end(threshold):
    vad = {"silence_duration_ms": 500.0, "prefix_padding_ms": 300.0, "threshold": threshold}
    format = {"type": "audio/pcm", "rate": 16000.0}
    after = updated(SessionSettings(), input_of(turn_detection=vad, format=format)).input
    assert (after.turn_detection.silence_duration_ms, after.format.rate) == (500, 16_000)
    assert type(after.format.rate) is type(after.turn_detection.prefix_padding_ms) is int
    assert after.turn_detection.threshold == threshold


def test_an_empty_language_is_to_be_detected_and_an_empty_model_is_no_change():
    before = updated(
        SessionSettings(), input_of(transcription={"language": "de", "model": "whisper-1"})
    )
    after = updated(before, input_of(transcription={"language": "", "model": ""}))
    assert after.input.transcription.language is None
    assert after.input.transcription.model == "whisper-1"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", "invalid_json", "not JSON"),
        ("[" * 100_000, "invalid_event", "expected at most 10000: send fewer"),
        ("[1]", "invalid_event", "expected an object"),
        ('{"a": 1}', "invalid_value", "type = None; a transcription session takes"),
        ('{"type": "response.create"}', "invalid_value", "type = 'response.create'"),
        ('{"type": "input_audio_buffer.append"}', "missing_required_parameter", "audio is missing"),
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
        events.check_event(events.read_event(text), len(text))
    assert refused.value.status.code == code and len(str(refused.value)) < 400


def test_what_is_long_and_no_audio_is_refused_before_it_is_read(monkeypatch):
    audio = '{"type": "input_audio_buffer.append", "audio": "' + "A" * 1_000_000 + '"}'
    assert events.read_event(audio)["type"] == "input_audio_buffer.append"
    monkeypatch.setattr(events, "parse_json", None)
    keys = ",".join(f'"k{number}":1' for number in range(20_000))
    with pytest.raises(EventError, match="expected at most 100000, but for input_audio_buffer"):
        events.read_event('{"type": "session.update", "session": {' + keys + "}}")


@pytest.mark.parametrize("audio", ["AAAAA", "ÄÄÄÄ", "AA=A", 7])
def test_audio_must_be_base64(audio):
    with pytest.raises(EventError, match="audio") as refused:
        events.read_audio(audio)
    assert (refused.value.status.code, refused.value.param) == ("invalid_value", "audio")


def test_base64_may_have_line_breaks_another_alphabet_and_no_padding():
    data = bytes(range(256)) + b"\xff\xfe"
    for size in range(252, 259):
        text = base64.b64encode(data[:size]).decode()
        broken = "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)) + "\n"
        for written in (text, text.rstrip("="), broken, text.translate(str.maketrans("+/", "-_"))):
            assert events.read_audio(written) == data[:size]


@pytest.mark.parametrize("model", ["gpt-realtime-whisper", "gpt-live-transcribe-2026"])
def test_clients_of_models_without_turns_end_them(model):
    """As LiveKit does, which sends no turn_detection for them."""
    asked = {"type": "transcription", "audio": {"input": {"transcription": {"model": model}}}}
    assert updated(SessionSettings(), asked).input.turn_detection is None
    asked["audio"]["input"]["turn_detection"] = {"type": "server_vad", "threshold": 0.25}
    assert updated(SessionSettings(), asked).input.turn_detection == ServerVad(threshold=0.25)
    asked = {"audio": {"input": {"transcription": {"model": "gpt-4o-transcribe"}}}}
    assert updated(SessionSettings(), asked).input.turn_detection == ServerVad()


def test_turn_detection_stays_while_models_are_of_one_kind():
    def named(settings, model, **input):
        return updated(settings, input_of(transcription={"model": model}, **input))

    live = named(SessionSettings(), "gpt-live-transcribe")
    explicit = named(live, "gpt-realtime-whisper", turn_detection={"threshold": 0.25})
    assert named(explicit, "gpt-live-transcribe").input.turn_detection.threshold == 0.25
    assert updated(live, input_of(transcription={"language": "de"})).input.turn_detection is None
    assert named(live, "whisper-1").input.turn_detection == ServerVad()
    silent = named(SessionSettings(), "whisper-1", turn_detection=None)
    assert named(silent, "gpt-4o-transcribe").input.turn_detection is None
