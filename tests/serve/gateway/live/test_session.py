"""Sessions over a gateway, with a stand-in for Triton that hears a word a second."""

import base64
import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from serve.contract.server_config import LiveConfig
from serve.gateway.live.settings import HYPOTHESIS
from tests.gateways import WAIT_S, until
from tests.jobs import ALICE, keys_of
from tests.serve.gateway.live.sessions import LIVE, refused_session, session, sound

SPEECH, QUIET = sound(3.3), sound(1.0, level=0.0)


def test_an_utterance_becomes_text_word_by_word(talk):
    client = talk()
    client.audio(sound(0.5, level=0.0))
    for i in range(0, len(SPEECH), 48_000):
        client.audio(SPEECH[i : i + 48_000])
    client.audio(QUIET)
    started = client.until("speech_started")
    done = client.until(".completed")
    item = started["item_id"]
    kinds = [
        event["type"].rpartition(".")[2] for event in client.events if ".delta" not in str(event)
    ]
    assert kinds[-6:] == [
        *("speech_started", "speech_stopped", "committed", "added", "done", "completed")
    ]
    assert client.deltas(item) == done["transcript"] == "one two three four"
    assert done["item_id"] == item and done["usage"]["type"] == "duration"
    by_type = {event["type"].rpartition(".")[2]: event for event in client.events}
    begin_ms, end_ms = started["audio_start_ms"], by_type["speech_stopped"]["audio_end_ms"]
    assert 150 <= begin_ms <= 250 and 4250 <= end_ms <= 4400, "padding before, silence behind"
    assert done["usage"]["seconds"] == pytest.approx((end_ms - begin_ms) / 1000, abs=0.04)
    assert by_type["committed"]["previous_item_id"] is None
    assert by_type["done"]["item"]["id"] == item
    page = client.running.page()
    assert "earshot_live_word_seconds_count 4.0" in page and "earshot_live_streams 1.0" in page
    assert 'earshot_live_updates_total{outcome="ok"}' in page


def test_who_asks_for_it_is_told_what_is_heard_and_not_yet_final(talk):
    client = talk()
    session = {"type": "transcription", "include": [HYPOTHESIS]}
    client.say("session.update", session=session)
    for i in range(0, len(SPEECH), 48_000):
        client.audio(SPEECH[i : i + 48_000])
        until(lambda i=i: len(client.running.triton.ended) > i // 48_000)
    client.audio(QUIET)
    final, heard = "", []
    while True:
        event = json.loads(client.socket.recv(timeout=WAIT_S))
        if event["type"] == HYPOTHESIS:
            heard.append(final + event["text"])
        elif event["type"].endswith(".delta"):
            final += event["delta"]
        elif event["type"].endswith(".completed"):
            break
    assert final == "one two three four"
    assert len(set(heard)) > 1
    assert all(final.startswith(text.strip()) for text in heard)
    # Each decoding takes the one before as its draft, and none is tried again.
    asked = client.running.triton.inputs
    assert len(asked) > 2
    assert all(one["WORD_TIMESTAMPS"] and one["BEAM_SIZE"] == 1 for one in asked)
    assert all(one["TEMPERATURE"] == 0 for one in asked)
    assert asked[-1]["DRAFT"] == [50, 51, 52] or asked[-1]["DRAFT"] == [50, 51, 52, 53]


def test_a_second_utterance_follows_the_first(talk):
    client = talk()
    first = client.utterance(SPEECH + QUIET)
    second = client.utterance(SPEECH + QUIET)
    texts = first["transcript"], second["transcript"]
    assert texts == ("one two three four", "five six"), "heard with the first, and told once"
    (_, committed) = [event for event in client.events if event["type"].endswith(".committed")]
    assert committed["previous_item_id"] == first["item_id"] != second["item_id"]


def test_a_client_may_say_itself_where_an_utterance_ends(talk):
    client = talk(turn_detection=None, format={"type": "audio/pcma"})
    client.say("input_audio_buffer.commit", event_id="early")
    error = client.until("error")["error"]
    assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "early")
    client.audio(bytes([0x55, 0xD5]) * 8_000)  # as quiet as A-law can be
    assert client.commit() == "", "nobody spoke"
    assert not client.running.triton.requests
    client.audio(bytes([0x2A, 0x2A, 0xAA, 0xAA]) * 4_000)  # as loud
    assert client.commit() == "one two"
    assert not any("speech" in event["type"] for event in client.events)


def test_audio_in_small_pieces_is_whole_at_a_commit_and_at_the_servers_end(talk):
    """It is collected until there are 96 ms."""
    client, data = talk(turn_detection=None), sound(1.07)
    for end in ("commit", "drain"):
        for i in range(0, len(data), 960):
            client.audio(data[i : i + 960])
        if end == "commit":
            client.say("input_audio_buffer.commit")
        else:
            client.say("nothing")  # answered after the audio
            client.until("error")
            client.running.submit(client.running.gateway.drain())
        seconds = client.until(".completed")["usage"]["seconds"]
        assert seconds == pytest.approx(1.07, abs=0.05), end


def test_a_moment_is_no_speech_and_has_no_text(talk):
    client = talk()
    assert client.utterance(sound(0.05) + QUIET)["transcript"] == ""
    assert client.utterance(sound(5.5, level=0.0) + sound(0.05) + QUIET)["transcript"] == ""
    assert not client.running.triton.requests
    assert client.utterance(SPEECH + QUIET)["transcript"] == "one two three four"


def test_an_utterance_begins_with_the_audio_right_before_it(talk):
    """Not with older audio, from before a client committed for a while."""
    client = talk()
    client.audio(sound(0.5, level=0.005))
    client.set(turn_detection=None, transcription={"language": ""})
    client.audio(SPEECH + QUIET)
    client.commit()
    client.set(turn_detection={"type": "server_vad"})
    client.utterance(sound(0.1, level=0.0) + SPEECH + QUIET)
    asked = client.running.triton.inputs[-1]
    samples = np.frombuffer(asked["SAMPLES"], np.float32)
    begins = int(np.argmax(np.abs(samples) > 0.01))
    assert 0 < begins < 0.3 * 16_000
    assert np.abs(samples[: begins - 100]).max(initial=0.0) < 0.003


def test_what_is_cleared_is_not_heard_of_again(talk):
    client = talk()
    client.audio(SPEECH)
    item = client.until("speech_started")["item_id"]
    client.say("input_audio_buffer.clear")
    client.until("cleared")
    done = client.utterance(SPEECH + QUIET)
    assert done["item_id"] != item and done["transcript"] == "one two three four"


def test_longer_audio_than_a_window_is_cut_and_its_text_becomes_the_prompt(talk):
    client = talk(prompt=" ".join(f"word{i}." for i in range(30)))
    client.utterance(sound(24.0) + QUIET)
    asked = client.running.triton.inputs
    lengths = [len(one["SAMPLES"]) / 4 / 16_000 for one in asked]
    assert max(lengths) < 28.0 and lengths[-1] < 20.0
    assert asked[-1]["PROMPT"].endswith(".") and len(asked[-1]["PROMPT"]) > len(asked[0]["PROMPT"])


def test_openais_own_client_transcribes(start, loud_is_speech, client_of):
    realtime = client_of(start(live=LIVE)).realtime
    connected = realtime.connect(extra_query={"intent": "transcription"}, model="whisper-1")
    with connected as connection:
        transcription = {"model": "whisper-1", "prompt": "one two three four five"}
        input = {"turn_detection": None, "transcription": transcription}
        connection.session.update(session={"type": "transcription", "audio": {"input": input}})
        connection.input_audio_buffer.append(audio=base64.b64encode(SPEECH).decode())
        connection.input_audio_buffer.commit()
        for event in connection:
            if event.type == "conversation.item.input_audio_transcription.completed":
                break
        assert event.transcript == "one two three"


# ---------------------------------------------------------------- what is wrong


def test_wrong_events_are_answered_and_change_nothing(talk):
    client = talk()
    client.set(event_id="first", turn_detection={"type": "manual"})
    client.set(transcription={"model": "gpt-9"})
    client.socket.send("{")
    client.socket.send(b"\0\1")
    client.say("response.create", event_id="third")
    client.say("input_audio_buffer.append", audio="?")
    client.say("session.update", session=[])
    errors = [client.until("error")["error"] for _ in range(7)]
    assert [error["code"] for error in errors] == [
        *("invalid_value", "model_not_found", "invalid_json", "invalid_json"),
        *("invalid_value", "invalid_value", "invalid_value"),
    ]
    assert errors[0]["event_id"] == "first" and errors[4]["event_id"] == "third"
    assert errors[1]["param"] == "session.audio.input.transcription.model"
    client.utterance(SPEECH + QUIET)
    client.set(format={"type": "audio/pcmu"})
    assert "the format cannot change" in client.until("error")["error"]["message"]


def test_a_flood_of_wrong_events_ends_the_session(talk):
    client = talk()
    for _ in range(101):
        client.socket.send("{}")
    assert client.end() == 1008
    assert client.events[-1]["error"]["code"] == "too_many_errors"


def test_text_that_is_none_ends_the_session_and_leaves_no_trace(talk, caplog):
    client = talk()
    client.socket.socket.sendall(bytes([0x81, 0x82, 0, 0, 0, 0, 0xFF, 0xFE]))
    assert client.end() == 1007
    until(lambda: client.running.services.admission.requests == 0)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("error:OptionError: no", "invalid_request"), ("error:INTERNAL EarshotError: boom", "server")],
)
def test_an_utterance_that_fails_is_told_and_others_follow(talk, prompt, kind):
    client = talk(prompt=prompt, live=LiveConfig(update_s=30.0))
    client.audio(SPEECH + QUIET)
    failed = client.until(".failed")
    assert failed["error"]["type"] == f"{kind}_error"
    client.set(transcription={"prompt": "one two three four five"})
    assert client.utterance(SPEECH + QUIET)["transcript"] == "one two three four"


def grows(items):
    """Whether any is added within a while."""
    before = len(items)
    time.sleep(0.3)
    return len(items) > before


# ---------------------------------------------------------------- too fast, too slow, gone


def test_audio_that_comes_faster_than_it_is_decoded_waits_on_the_wire(talk, monkeypatch):
    monkeypatch.setattr("serve.gateway.edge.listen.PING_S", 0.2)
    client = talk(prompt="wait")
    pushed = []

    def push():
        with contextlib.suppress(ConnectionClosed):
            while len(pushed) < 400:
                client.audio(sound(1.0))
                pushed.append(1)

    thread = threading.Thread(target=push)
    thread.start()
    until(lambda: client.running.triton.requests and len(pushed) > 10)
    until(lambda: not grows(pushed))
    assert len(pushed) < 100, "they went into what should hold seconds"
    # The server does not read from the client now, and still sees it go.
    client.socket.socket.shutdown(socket.SHUT_RDWR)
    thread.join()
    until(lambda: client.running.services.admission.requests == 0)


def test_a_client_that_vanishes_leaves_nothing_behind(talk):
    client = talk(prompt="wait")
    client.audio(SPEECH)
    triton = client.running.triton
    until(lambda: triton.requests)
    client.socket.socket.shutdown(socket.SHUT_RDWR)
    until(lambda: triton.ended)
    assert triton.cancelled == triton.ended
    until(lambda: client.running.services.admission.requests == 0)
    assert "earshot_live_streams 0.0" in client.running.page()


@pytest.mark.parametrize(
    ("limit", "code"),
    [("route.IDLE_TIMEOUT_S", "session_idle"), ("events.MAX_SESSION_S", "session_expired")],
)
def test_a_silent_client_and_a_long_session_are_ended(
    start, loud_is_speech, monkeypatch, limit, code
):
    monkeypatch.setattr(f"serve.gateway.live.{limit}", 0.3)
    with session(start()) as client:
        assert client.end() == 1001
    assert client.events[-1]["error"]["code"] == code


def test_more_streams_than_may_be_are_refused(talk):
    client = talk(live=LiveConfig(max_streams=1))
    status, error = refused_session(client.running)
    assert (status, "live.max_streams" in error["message"]) == (429, True)


def test_a_draining_gateway_answers_what_came_in_and_ends_sessions(talk):
    client = talk()
    client.audio(SPEECH)
    client.until("speech_started")
    until(lambda: client.running.triton.requests)
    drained = client.running.submit(client.running.gateway.drain())
    assert client.until(".completed")["transcript"] == "one two three"
    assert client.until("error")["error"]["code"] == "server_stopping"
    assert client.end() == 1012
    assert drained.result(WAIT_S)
    assert refused_session(client.running)[0] == 503


def test_a_fault_of_ours_ends_one_session_and_no_other(talk, monkeypatch):
    other = talk()
    client = talk(other.running)
    monkeypatch.setattr(
        "serve.gateway.live.utterance.LiveUtterance.window", lambda self: np.zeros(3) @ np.zeros(4)
    )
    client.audio(SPEECH)
    assert client.until("error")["error"]["type"] == "server_error"
    assert client.end() == 1011
    monkeypatch.undo()
    other.set(transcription={"prompt": "still here"})
    other.until("session.updated")


@pytest.mark.parametrize(
    ("limit", "code"),
    [("audio_s_per_minute", "key_limit"), ("audio_s_per_day", "insufficient_quota")],
)
def test_keys_are_told_as_programs_and_as_browsers_do(start, loud_is_speech, tmp_path, limit, code):
    running = start(live=LIVE, keys_file=keys_of(tmp_path, alice={limit: 5.0}))
    no_key = {"Authorization": "Bearer no"}
    assert refused_session(running, additional_headers=no_key)[0] == 401
    offered = ["realtime", "openai-insecure-api-key.secret-a"]
    with session(running, subprotocols=offered) as client:
        assert client.socket.subprotocol == "realtime"
    with session(running, additional_headers=ALICE) as client:
        with contextlib.suppress(ConnectionClosed):  # it may be told while it still speaks
            for _ in range(8):
                client.audio(sound(1.0, level=0.0))
        assert client.end() == 1008
        error = client.events[-1]["error"]
        assert (limit in error["message"], error["code"]) == (True, code)
