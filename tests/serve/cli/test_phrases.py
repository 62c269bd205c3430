"""`python -m serve phrases`, as a user meets it."""

import pytest

from serve.cli.main import main
from tests.fakes import fake_engine


@pytest.fixture
def shown(tmp_path, capsys, monkeypatch):
    """The exit status, output and errors of the command for a file with some lines."""
    engines = {"engines/mine": fake_engine(tmp_path)}
    monkeypatch.setattr("serve.contract.engine.open_engine", engines.__getitem__)
    config = tmp_path / "some.toml"

    def show(text, configured="engines/mine", *more):
        config.write_text(f'engine = "{configured}"')
        (tmp_path / "names.txt").write_text(text)
        status = main(["phrases", "--config", str(config), str(tmp_path / "names.txt"), *more])
        return status, *capsys.readouterr()

    return show


def test_each_phrase_is_shown_with_its_weight_and_tokens(shown):
    status, out, _ = shown("Whittemore^2\n\nof\n")
    first, second, last = out.splitlines()
    name, weight, tokens = first.split(maxsplit=2)
    assert status == 0
    assert (name, weight, tokens.strip().replace("|", "").strip()) == ("Whittemore", "2", name)
    assert second.split()[:2] == ["of", "1"] and "short: it may appear" in second
    assert last.startswith("2 phrases, ")


def test_another_engine_than_the_configs_can_be_named(shown):
    status, out, _ = shown("Whittemore\n", "engines/absent", "--engine", "engines/mine")
    assert status == 0 and out.startswith("Whittemore")
