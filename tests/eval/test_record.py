"""The machine of a record."""

import pytest

from eval.record import load_line


@pytest.mark.parametrize(("percent", "warned"), [(0.0, False), (100.0, True)])
def test_a_busy_machine_is_told_before_anything_is_measured(percent, warned, monkeypatch):
    monkeypatch.setattr("eval.record.psutil.cpu_percent", lambda _: percent)
    line = load_line()
    assert "cores busy" in line and line.startswith("warning: ") is warned
