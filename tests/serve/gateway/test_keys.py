"""Who may call, and how often."""

import dataclasses
import os

import pytest

from serve.contract.config import Config
from serve.contract.errors import ConfigError
from serve.contract.keys import ENVIRONMENT, Key, add_key, hash_of
from serve.contract.server_config import GatewayConfig, LiveConfig, ServerConfig
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey, ApiKeys
from serve.gateway.limits import Admission
from serve.gateway.run import share_of
from tests.gateways import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.toml"
    add_key(path, "alice", {"sha256": hash_of("a")})
    return path


def refused(act, *arguments):
    with pytest.raises(ApiError) as caught:
        act(*arguments)
    return caught.value


@pytest.mark.parametrize("said", [None, "", "a", "Bearer", "Bearer ", "Basic a", "Bearer b", "é"])
def test_with_keys_one_is_needed(path, clock, said):
    callers = ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)
    assert refused(callers.identify, said).status.grpc == "UNAUTHENTICATED"
    assert callers.identify("bearer a").name == "alice"


def test_a_key_that_has_expired_is_known_no_more(path, clock):
    add_key(path, "bob", {"sha256": hash_of("b"), "expires": "2020-01-01"})
    callers = ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)
    refusal = refused(callers.identify, "Bearer b")
    assert (refusal.status.grpc, "expired, 2020-01-01" in str(refusal)) == ("UNAUTHENTICATED", True)


def test_keys_of_the_environment(path, clock, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, f"bob:{hash_of('b')}")
    callers = ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)
    assert callers.identify("Bearer b").name == "bob"
    monkeypatch.setenv(ENVIRONMENT, f"alice:{hash_of('b')}")
    with pytest.raises(ConfigError, match="both have a key alice"):
        ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)


def test_a_file_is_read_again_when_it_changes(path, clock, caplog):
    callers = ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)
    before = callers.identify("Bearer a")
    add_key(path, "bob", {"sha256": hash_of("b")})
    assert callers.identify("Bearer b").name == "bob"
    assert callers.identify("Bearer a") is before  # with the rest of the share
    path.write_text("not TOML")
    assert callers.identify("Bearer b").name == "bob"
    assert "the previous ones stay in use" in caplog.text
    path.write_text("")
    assert refused(callers.identify, "Bearer a").status.grpc == "UNAUTHENTICATED"


def test_a_file_that_keeps_its_age_and_size_is_read_again(path, clock):
    """As where a copy takes its original's age, or where who may read the file is changed."""
    callers = ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)
    before = path.stat()
    path.write_text(path.read_text().replace(hash_of("a"), hash_of("b")))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the system's clock ticks
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert callers.identify("Bearer b").name == "alice"
    assert refused(callers.identify, "Bearer a").status.grpc == "UNAUTHENTICATED"


def test_others_reach_no_server_without_keys_unless_told(path):
    for server in ({}, {"host": "127.0.0.2"}, {"host": "0.0.0.0", "open": True}):
        ApiKeys(Config(server=ServerConfig(**server)))
    ApiKeys(Config(server=ServerConfig(host="0.0.0.0", keys_file=str(path))))
    for host in ("0.0.0.0", "192.168.0.1"):
        with pytest.raises(ConfigError, match="keys new"):
            ApiKeys(Config(server=ServerConfig(host=host)))


def test_requests_of_a_minute(clock):
    caller = ApiKey("alice", Key("", requests_per_minute=3), clock)
    for _ in range(3):
        caller.count_request()
    refusal = refused(caller.count_request)
    assert (refusal.reason, refusal.retry_after_s) == ("key_limit", 20)
    assert str(refusal) == "the key alice has used up its requests_per_minute; try again in 20 s"
    clock.now_s += 20
    caller.count_request()
    assert refused(caller.count_request).retry_after_s == 20
    clock.now_s += 10_000
    for _ in range(3):
        caller.count_request()
    refused(caller.count_request)


def test_a_key_has_as_many_requests_at_once_as_it_may():
    admission = Admission(ServerConfig())
    alice, bob = ApiKey("alice"), ApiKey("bob")
    alice.max_requests = 2
    for _ in range(3):  # what has ended leaves room
        permits = [admission.admit(alice) for _ in range(2)]
        with pytest.raises(ApiError, match="alice has used up its requests_at_once"):
            admission.admit(alice)
        admission.admit(bob).release()
        for permit in permits:
            permit.release()
    assert (alice.requests, admission.requests) == (0, 0)


def test_what_is_left_is_told_as_openai_tells_it(clock):
    caller = ApiKey("alice", Key("", requests_per_minute=60, audio_s_per_minute=30.0), clock)
    caller.count_request()
    caller.count_audio(40.0)
    assert caller.limit_headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-audio-seconds": "30",
        "x-ratelimit-remaining-audio-seconds": "0",
        "x-ratelimit-reset-audio-seconds": "80s",
    }
    assert ApiKey("bob", Key(""), clock).limit_headers() == {}


def test_audio_that_is_limited_must_be_told(clock):
    for key, outputs, may in (
        (Key("", audio_s_per_minute=60), ["TEXT"], False),
        (Key("", audio_s_per_minute=60), ["TEXT", "DURATION"], True),
        (Key("", audio_s_per_minute=60), [], True),
        (Key("", audio_s_per_day=60), ["TEXT"], False),
        (Key("", audio_s_per_day=60), ["TEXT", "DURATION"], True),
        (Key(""), ["TEXT"], True),
    ):
        caller = ApiKey("alice", key, clock)
        if may:
            caller.require_duration(outputs)
        else:
            assert "DURATION" in str(refused(caller.require_duration, outputs))


def test_a_quota_that_a_stop_would_forget_is_warned_of(path, clock, caplog):
    add_key(path, "bob", {"sha256": hash_of("b"), "audio_s_per_day": 1.0})
    server = ServerConfig(keys_file=str(path), usage_file="usage.sqlite")
    ApiKeys(Config(server=server), clock)
    assert not caplog.text
    ApiKeys(Config(server=ServerConfig(keys_file=str(path))), clock)
    assert "no server.usage_file is named" in caplog.text


def test_each_process_has_its_share_of_all_limits_rounded_up(path):
    server = ServerConfig(max_inflight=9, max_inflight_mb=1024, keys_file=str(path))
    config = Config(server=server, live=LiveConfig(max_streams=64))
    assert share_of(config) == config, "one alone has everything"
    config = dataclasses.replace(config, gateway=GatewayConfig(processes=3))
    share = share_of(config)
    assert (share.server.max_inflight, share.server.max_inflight_mb) == (3, 342)
    assert share.live.max_streams == 22
    add_key(path, "carol", {"sha256": hash_of("c"), "requests_per_minute": 60})
    assert ApiKeys(config).identify("Bearer c").key == Key(hash_of("c"), 20)
