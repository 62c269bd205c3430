"""The section [build], beside serve's."""

import pytest

from build.config import BuildConfig, load_config
from serve.contract.errors import ConfigError


def test_build_reads_its_own_section_and_serves(tmp_path):
    path = tmp_path / "product.toml"
    path.write_text(
        "engine = 'e'\n[build]\nprecision = 'fp16'\n[runtime]\nslots = 3\n[eval]\nanything = 1"
    )
    config = load_config(path)
    assert config.build == BuildConfig(precision="fp16")
    assert (config.name, config.engine, config.runtime.slots) == ("product", "e", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[build]\nprecision = 'int4'", r"build\.precision = 'int4'; expected 'int8' or 'fp16'"),
        ("[build]\ntokeniser = 'x'", r"build: unknown key 'tokeniser'; did you mean 'tokenizer'"),
        ("build = 3", r"build = 3; expected a table"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "product.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"product\.toml: {message}"):
        load_config(path)
