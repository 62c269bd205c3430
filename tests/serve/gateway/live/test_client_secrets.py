"""Short-lived keys with which browsers open live sessions."""

import json
import time

import pytest
from openai import AuthenticationError, BadRequestError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from serve.contract.keys import add_key, expire_key, hash_of, new_key, revoke_key
from serve.gateway.client_secrets import MAX_CHARS, ClientSecret, ClientSecrets
from serve.gateway.errors import ApiError
from tests.gateways import until
from tests.serve.gateway.live.conftest import LIVE, Talk, sound

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
def keys(tmp_path):
    """A file of two keys, and these."""
    path, keys = tmp_path / "keys.toml", {name: new_key() for name in ("alice", "bob")}
    for name, key in keys.items():
        add_key(path, name, {"sha256": hash_of(key)})
    return path, keys


@pytest.fixture
def keyed(start, keys):
    """A gateway with these, their file, and they."""
    path, named = keys
    return start(live=LIVE, keys_file=str(path)), path, named


def url(running, query=""):
    return f"ws://{running.http}/v1/realtime{query}"


def offered(secret):
    """As a browser does, which cannot set headers."""
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{secret}"]}


def refused_at(running, secret):
    with pytest.raises(InvalidStatus) as refused:
        connect(url(running), **offered(secret))
    response = refused.value.response
    return response.status_code, json.loads(response.body)["error"]["message"]


def test_openais_client_makes_one_and_a_browser_opens_a_session_with_it(
    loud_is_speech, keyed, client_of, caplog
):
    running, _, named = keyed
    made = client_of(running, named["alice"]).realtime.client_secrets.create(
        session=SESSION, expires_after={"anchor": "created_at", "seconds": 60}
    )
    assert made.value.startswith("ek_") and len(made.value) < 500
    assert 50 < made.expires_at - time.time() <= 61
    assert made.session.type == "transcription" and made.session.id.startswith("sess_")
    assert made.session.audio.input.transcription.prompt == "one two three four five"
    with connect(url(running), **offered(made.value)) as socket:
        assert socket.subprotocol == "realtime"
        client = Talk(socket)
        input = client.until("session.created")["session"]["audio"]["input"]
        assert input["turn_detection"] is None
        client.audio(sound(3.3))
        assert client.commit() == "one two three"
        counted = 'earshot_gateway_audio_seconds_total{key="alice",route="live"} 3.3'
        assert counted in running.page()
    assert made.value not in caplog.text
    with connect(
        url(running, "?model=gpt-4o-transcribe"),
        additional_headers={"Authorization": f"Bearer {made.value}"},
    ) as socket:
        input = Talk(socket).next()["session"]["audio"]["input"]
        assert input["transcription"]["model"] == "gpt-4o-transcribe", "the client's word counts"
        assert input["transcription"]["prompt"] == "one two three four five"


def test_it_opens_sessions_and_nothing_else(keyed, client_of):
    running, _, named = keyed
    made = client_of(running, named["alice"]).realtime.client_secrets.create()
    browser = client_of(running, made.value)
    for ask in (
        browser.realtime.client_secrets.create,
        browser.models.list,
        lambda: browser.audio.transcriptions.create(model="whisper-1", file=b"RIFF"),
    ):
        with pytest.raises(AuthenticationError, match="opens live sessions at /v1/realtime only"):
            ask()
    with pytest.raises(AuthenticationError, match="unknown"):
        client_of(running, "no").realtime.client_secrets.create()


def test_it_ends_with_its_key(loud_is_speech, keyed, client_of):
    running, path, named = keyed
    made = {
        name: client_of(running, key).realtime.client_secrets.create().value
        for name, key in named.items()
    }
    expire_key(path, "bob", "2020-01-01")
    status, message = refused_at(running, made["bob"])
    assert (status, "expired, 2020-01-01" in message) == (401, True)
    with connect(url(running), **offered(made["alice"])) as socket:
        client = Talk(socket)
        client.until("session.created")
        revoke_key(path, "alice")
        client.audio(sound(1.0, level=0.0))
        assert client.end() == 1008
    assert refused_at(running, made["alice"])[0] == 401
    add_key(path, "alice", {"sha256": hash_of(new_key())})
    assert refused_at(running, made["alice"])[0] == 401, "another key of the same name"


def test_without_keys_anybody_may_have_one_and_a_session_goes_on_after_it_has_expired(
    start, loud_is_speech, client_of
):
    running = start(live=LIVE)
    made = client_of(running).realtime.client_secrets.create(session=SESSION)
    assert 590 < made.expires_at - time.time() <= 601
    status, message = refused_at(running, "ek_68af296e8e408191a1120ab6383263c2")
    assert (status, "none of this server's" in message) == (401, True)
    with connect(url(running), **offered(made.value)) as socket:
        client = Talk(socket)
        client.until("session.created")
        # As of another gateway of the same run, ten minutes later.
        running.services.client_secrets.clock = lambda: time.time() + 601
        status, message = refused_at(running, made.value)
        assert (status, "has expired" in message) == (401, True)
        client.audio(sound(3.3))
        assert client.commit() == "one two three"


def test_its_keys_limits_count(start, loud_is_speech, tmp_path, client_of):
    path, key = tmp_path / "keys.toml", new_key()
    add_key(path, "alice", {"sha256": hash_of(key), "live_streams": 1})
    running = start(live=LIVE, keys_file=str(path))
    made = client_of(running, key).realtime.client_secrets.create()
    with connect(url(running), additional_headers={"Authorization": f"Bearer {key}"}) as socket:
        Talk(socket).until("session.created")
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
