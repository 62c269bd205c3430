"""Short-lived keys with which browsers open live sessions."""

import json
import time
from pathlib import Path

import pytest
from openai import AuthenticationError, BadRequestError

from serve.contract.keys import add_key, expire_key, hash_of, revoke_key
from serve.gateway.client_secrets import MAX_CHARS, ClientSecret, ClientSecrets
from serve.gateway.errors import ApiError
from tests.gateways import until
from tests.jobs import ALICE, keys_of
from tests.serve.gateway.live.sessions import LIVE, refused_session, session, sound

SESSION = {
    "type": "transcription",
    "audio": {
        "input": {
            "turn_detection": None,
            "transcription": {"model": "whisper-1", "prompt": "one two three four five"},
        }
    },
}
PATH = "/v1/realtime/client_secrets"


@pytest.fixture
def keys_file(tmp_path):
    return keys_of(tmp_path)


@pytest.fixture
def keyed(start, keys_file):
    return start(live=LIVE, keys_file=keys_file)


def offered(secret):
    """As a browser does, which cannot set headers."""
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{secret}"]}


def refused_at(running, secret):
    status, error = refused_session(running, **offered(secret))
    return status, error["message"]


def input_of(client):
    """The settings with which its session began."""
    return client.events[0]["session"]["audio"]["input"]


def test_openais_client_makes_one_and_a_browser_opens_a_session_with_it(
    loud_is_speech, keyed, client_of, caplog
):
    made = client_of(keyed, "secret-a").realtime.client_secrets.create(
        session=SESSION, expires_after={"anchor": "created_at", "seconds": 60}
    )
    assert made.value.startswith("ek_") and len(made.value) < 500
    assert 50 < made.expires_at - time.time() <= 61
    assert made.session.type == "transcription" and made.session.id.startswith("sess_")
    assert made.session.audio.input.transcription.prompt == "one two three four five"
    with session(keyed, **offered(made.value)) as client:
        assert client.socket.subprotocol == "realtime"
        assert input_of(client)["turn_detection"] is None
        client.audio(sound(3.3))
        assert client.commit() == "one two three"
        counted = 'earshot_gateway_audio_seconds_total{key="alice",route="live"} 3.3'
        assert counted in keyed.page()
    assert made.value not in caplog.text
    bearer = {"Authorization": f"Bearer {made.value}"}
    with session(keyed, "?model=gpt-4o-transcribe", additional_headers=bearer) as client:
        found = input_of(client)["transcription"]
        assert found["model"] == "gpt-4o-transcribe", "the client's word counts"
        assert found["prompt"] == "one two three four five"


def test_it_opens_sessions_and_nothing_else(keyed, client_of):
    made = client_of(keyed, "secret-a").realtime.client_secrets.create()
    browser = client_of(keyed, made.value)
    for ask in (
        browser.realtime.client_secrets.create,
        browser.models.list,
        lambda: browser.audio.transcriptions.create(model="whisper-1", file=b"RIFF"),
    ):
        with pytest.raises(AuthenticationError, match="opens live sessions at /v1/realtime only"):
            ask()
    with pytest.raises(AuthenticationError, match="unknown"):
        client_of(keyed, "no").realtime.client_secrets.create()


def test_it_ends_with_its_key(loud_is_speech, keyed, keys_file, client_of):
    alices, bobs = (
        client_of(keyed, key).realtime.client_secrets.create().value
        for key in ("secret-a", "secret-b")
    )
    path = Path(keys_file)
    expire_key(path, "bob", "2020-01-01")
    status, message = refused_at(keyed, bobs)
    assert (status, "expired, 2020-01-01" in message) == (401, True)
    with session(keyed, **offered(alices)) as client:
        revoke_key(path, "alice")
        client.audio(sound(1.0, level=0.0))
        assert client.end() == 1008
    assert refused_at(keyed, alices)[0] == 401
    add_key(path, "alice", {"sha256": hash_of("another")})
    assert refused_at(keyed, alices)[0] == 401, "another key of the same name"


def test_without_keys_anybody_may_have_one_and_a_session_goes_on_after_it_has_expired(
    start, loud_is_speech, client_of
):
    running = start(live=LIVE)
    made = client_of(running).realtime.client_secrets.create(session=SESSION)
    assert 590 < made.expires_at - time.time() <= 601
    status, message = refused_at(running, "ek_68af296e8e408191a1120ab6383263c2")
    assert (status, "none of this server's" in message) == (401, True)
    with session(running, **offered(made.value)) as client:
        # As of another gateway of the same run, ten minutes later.
        running.services.client_secrets.clock = lambda: time.time() + 601
        status, message = refused_at(running, made.value)
        assert (status, "has expired" in message) == (401, True)
        client.audio(sound(3.3))
        assert client.commit() == "one two three"


def test_its_keys_limits_count(start, loud_is_speech, tmp_path, client_of):
    running = start(live=LIVE, keys_file=keys_of(tmp_path, alice={"live_streams": 1}))
    made = client_of(running, "secret-a").realtime.client_secrets.create()
    with session(running, additional_headers=ALICE):
        status, message = refused_at(running, made.value)
        assert (status, "live_streams" in message) == (429, True)
    until(lambda: running.services.admission.requests == 0)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"expires_after": {"seconds": 9}}, "expires_after.seconds", "at least 10"),
        ({"expires_after": {"anchor": "now"}}, "expires_after.anchor", "created_at"),
        ({"session": {"type": "realtime"}}, "session.type", "expected 'transcription'"),
        ({"session": 3}, "session", "session = 3"),
        (
            {"session": {"audio": {"input": {"transcription": {"model": "gpt-9"}}}}},
            "session.audio.input.transcription.model",
            "no model",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(shared, client_of, body, param, message):
    with pytest.raises(BadRequestError, match=message) as refused:
        client_of(shared).realtime.client_secrets.create(**body)
    assert refused.value.param == param


def test_a_body_may_be_empty_and_hold_what_is_unknown(shared):
    assert shared.ask("POST", PATH)[0] == 200
    body = {"foo": 1, "session": {"voice": "alloy", "type": "transcription"}}
    status, headers, answer = shared.ask("POST", PATH, json.dumps(body))
    told = json.loads(answer)
    assert status == 200 and headers["cache-control"] == "no-store"
    assert [one["param"] for one in told["warnings"]] == ["session.voice", "foo"]
    assert told["session"]["object"] == "realtime.transcription_session"


def test_long_settings_do_not_fit(shared):
    long = "".join(chr(0x4E00 + number) for number in range(5000))
    body = {"session": {"audio": {"input": {"transcription": {"prompt": long}}}}}
    status, _, answer = shared.ask("POST", PATH, json.dumps(body))
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "session")
    assert f"at most {MAX_CHARS}" in error["message"]


def test_gateways_of_one_run_read_each_others_and_no_forgery():
    secret = ClientSecret(round(time.time()) + 60, "id", {"include": []})
    one, same, other = ClientSecrets(b"key"), ClientSecrets(b"key"), ClientSecrets(b"another")
    value = one.sign(secret)
    assert same.read(value) == secret
    content, _, signature = value.partition(".")
    for forged in (
        *(f"{content}.", content, "ek_", f"{content}x.{signature}", f"{content}.{signature}x"),
        other.sign(secret),
        f"{content}.é",
    ):
        with pytest.raises(ApiError, match="none of this server's"):
            one.read(forged)
