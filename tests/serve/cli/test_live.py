"""`python -m serve live`, before a gateway over a stand-in for Triton."""

import contextlib

import pytest

from serve.cli.main import main
from serve.contract.keys import add_key, hash_of
from serve.supervisor.server import config_to_toml
from tests.gateways import Running


@pytest.fixture
def toml(tmp_path):
    """The config of a server that wants a key."""
    keys, path = tmp_path / "keys.toml", tmp_path / "a.toml"
    add_key(keys, "alice", {"sha256": hash_of("secret-a")})
    (tmp_path / "run").mkdir()
    with contextlib.closing(Running(tmp_path / "run", 600.0, keys_file=str(keys))) as running:
        path.write_text(config_to_toml(running.config), encoding="utf-8")
        yield path


@pytest.mark.parametrize(
    ("key", "says"), [(None, "EARSHOT_API_KEY"), ("secret-b", "this API key is unknown")]
)
def test_a_server_that_refuses_says_why(toml, capsys, monkeypatch, key, says):
    monkeypatch.delenv("EARSHOT_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("EARSHOT_API_KEY", key)
    assert main(["live", "--config", str(toml), "tests/data/en_two.wav"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and says in told and "WebSocket" not in told
