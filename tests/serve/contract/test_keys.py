"""API keys in a file and in the environment."""

import pytest

from serve.contract.errors import ConfigError, FileError
from serve.contract.keys import (
    ENVIRONMENT,
    Key,
    add_key,
    environment_keys,
    expire_key,
    hash_of,
    new_key,
    read_keys,
    revoke_key,
)

HASH = hash_of("a")


def test_keys_are_long_and_never_the_same():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 43 for key in keys)  # 256 bits


def test_one_of_several_processes_gives_its_share():
    assert Key(HASH, 5, 0.5).share(1) == Key(HASH, 5, 0.5)
    assert Key(HASH, 5, 90.0, None, 1).share(2) == Key(HASH, 3, 45, None, 1)
    assert Key(HASH, audio_s_per_day=90.0).share(2) == Key(HASH, audio_s_per_day=90.0)


def test_what_is_added_is_read(tmp_path):
    path = tmp_path / "keys.toml"
    add_key(path, "alice", {"sha256": HASH, "requests_per_minute": None})
    add_key(path, "bob-2", {"sha256": HASH, "requests_per_minute": 5, "audio_s_per_minute": 0.5})
    assert read_keys(path) == {"alice": Key(HASH), "bob-2": Key(HASH, 5, 0.5)}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("alice", {}, "already has a key alice"),
        ("", {}, "1 to 60 of"),
        ("b", {"sha256": "a"}, "64 hexadecimal digits"),
        ("b", {"requests_per_minute": 0}, "more than 0"),
        ("b", {"audio_s_per_minute": float("nan")}, "audio_s_per_minute"),
        ("b", {"expires": "soon"}, "a day or a time"),
    ],
)
def test_what_cannot_be_added_changes_nothing(tmp_path, name, fields, told):
    path = tmp_path / "keys.toml"
    add_key(path, "alice", {"sha256": HASH})
    before = path.read_text()
    with pytest.raises(ConfigError, match=told):
        add_key(path, name, {"sha256": HASH, **fields})
    assert path.read_text() == before


@pytest.fixture
def three(tmp_path):
    path = tmp_path / "keys.toml"
    for name in ("alice", "bob", "carol"):
        add_key(path, name, {"sha256": HASH, "live_streams": 2})
    return path


def test_a_key_is_revoked_and_the_others_stay(three):
    revoke_key(three, "bob")
    assert read_keys(three) == dict.fromkeys(("alice", "carol"), Key(HASH, live_streams=2))
    assert three.stat().st_mode & 0o777 == 0o600
    assert list(three.parent.iterdir()) == [three]


def test_what_cannot_be_changed_stays_as_it_is(three):
    before = three.read_text()
    for change in (
        lambda: revoke_key(three, "dora"),
        lambda: expire_key(three, "dora", "2030-01-01"),
        lambda: expire_key(three, "bob", "soon"),
    ):
        with pytest.raises(ConfigError):
            change()
    assert three.read_text() == before


def test_files_that_cannot_be(tmp_path):
    none = tmp_path / "none.toml"
    with pytest.raises(FileError, match=rf"file of API keys, .* keys new .* --file {none}") as said:
        read_keys(none)
    assert "config" not in str(said.value)
    with pytest.raises(FileError):
        add_key(tmp_path / "no" / "keys.toml", "alice", {"sha256": HASH})
    path = tmp_path / "keys.toml"
    for text, told in (("keys", "TOML"), ("[keys.a]\nkey = 'b'", "unknown key 'key'")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_keys(path)


def test_the_environment():
    assert environment_keys({}) == {}
    found = environment_keys({ENVIRONMENT: f"alice:{HASH}\n bob:{HASH}"})
    assert found == {"alice": Key(HASH), "bob": Key(HASH)}
    for wrong in ("alice", f"{HASH}", "alice:a", f"a b:{HASH}", f":{HASH}"):
        with pytest.raises(ConfigError, match=ENVIRONMENT) as caught:
            environment_keys({ENVIRONMENT: wrong})
        assert HASH not in str(caught.value) or wrong == HASH
