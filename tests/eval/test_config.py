"""The section [eval], beside serve's and build's."""

import pytest

from eval.config import EvalConfig, load_config
from serve.contract.errors import ConfigError


def test_eval_reads_all_sections(tmp_path):
    path = tmp_path / "product.toml"
    path.write_text(
        "engine = 'e'\n[build]\nprecision = 'fp16'\n[eval]\nsystems = ['a', 'b']\nrepeats = 1"
    )
    config = load_config(path)
    assert config.eval == EvalConfig(systems=("a", "b"), repeats=1)
    assert (config.name, config.engine, config.build.precision) == ("product", "e", "fp16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[eval]\nconcurrency = 2", r"eval\.concurrency was removed; it was the number"),
        ("[eval]\nrepeats = 0", r"eval\.repeats = 0; expected more than 0"),
        ("[eval]\nsystems = 'a'", r"eval\.systems = 'a'; expected a list"),
        ("[eval]\nthread = 1", r"eval: unknown key 'thread'; did you mean 'threads'"),
        ("[eval]\nheld_out = 'a'", r"eval: unknown key 'held_out'; did you mean 'heldout'"),
        ("[build]\nprecision = 'int4'", r"build\.precision = 'int4'"),
        ("[runtime]\nslots = 0", r"runtime\.slots = 0"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "product.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"product\.toml: {message}"):
        load_config(path)
