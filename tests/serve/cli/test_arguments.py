"""Arguments and variables of a command line that no request could hold."""

import pytest

from serve.cli.main import main

BYTE = "\udcff"  # as Python has a byte of an argument that is not UTF-8


@pytest.mark.parametrize(
    "arguments",
    [
        ["transcribe", "--config", "configs/demo.toml", "a.wav", "--prompt", f"Zo{BYTE}"],
        ["jobs", "submit", "--config", "configs/demo.toml", "--url", f"https://a/{BYTE}"],
        ["keys", "new", "--file", "keys.toml", "--name", BYTE],
    ],
)
def test_an_argument_that_is_not_utf_8_is_refused(arguments, capsys):
    assert main(arguments) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_key_that_no_header_holds_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("EARSHOT_API_KEY", BYTE)
    assert main(["jobs", "list", "--config", "configs/demo.toml"]) == 2
    assert "EARSHOT_API_KEY" in capsys.readouterr().err
