"""Configuration files: strict keys, strict values, one home of defaults."""

import dataclasses

import pytest

from serve.config import Config, load_config
from serve.errors import ConfigError


def load(tmp_path, text):
    path = tmp_path / "product.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_an_empty_file_is_all_defaults_named_after_the_file(tmp_path):
    assert load(tmp_path, "") == dataclasses.replace(Config(), name="product")


def test_values_reach_their_fields(tmp_path):
    config = load(
        tmp_path, 'name = "x"\n[runtime]\nslots = 3\n[transcriber]\ntemperatures = [0, 0.5]'
    )
    assert (config.name, config.runtime.slots) == ("x", 3)
    assert config.transcriber.temperatures == (0.0, 0.5)
    assert config.transcriber.max_pending == Config().transcriber.max_pending


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runtime]\nslot = 3", "unknown key 'slot'; did you mean 'slots'"),
        ("[surver]\n", "unknown key 'surver'; did you mean 'server'"),
        ("[runtime]\nslots = '3'", "slots = '3'; expected int"),
        ("[runtime]\nslots = true", "slots = True; expected int"),
        ("[runtime]\nslots = 0", "runtime.slots = 0; expected more than 0"),
        ("runtime = 3", "runtime must be a table"),
        ("[build]\nprecision = 'int4'", "expected one of int8, fp16"),
        ("[transcriber]\ntemperatures = []", "at least one value"),
        ("[transcriber]\ntemperatures = 0.5", "must be a list"),
        ("[transcriber]\ntemperatures = [1.5]", "each from 0 to 1"),
        ("[server]\nhttp_port = 8001", "three different ports"),
        ("[runtime\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=r"product\.toml") as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
