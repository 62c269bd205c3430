"""The machine of a record."""

import pytest

from eval.config import load_config
from eval.record import load_line
from serve.contract.errors import ConfigError


@pytest.mark.parametrize(("percent", "warned"), [(0.0, False), (100.0, True)])
def test_a_busy_machine_is_told_before_anything_is_measured(percent, warned, monkeypatch):
    monkeypatch.setattr("eval.record.psutil.cpu_percent", lambda _: percent)
    line = load_line()
    assert "cores busy" in line and line.startswith("warning: ") is warned


WRONG_KEYS = {
    "concurrency = 2": r"eval\.concurrency was removed; it was the number",
    "limit = -1": r"eval\.limit = -1; expected at least 0",
}


@pytest.mark.parametrize(("line", "message"), WRONG_KEYS.items())
def test_a_wrong_key_of_eval_is_refused_by_name(tmp_path, line, message):
    (tmp_path / "product.toml").write_text(f"[eval]\n{line}")
    with pytest.raises(ConfigError, match=rf"product\.toml: {message}"):
        load_config(tmp_path / "product.toml")
