"""SECURITY.md says what is so: its limits are the config's."""

import dataclasses
import re
from pathlib import Path

import pytest

from serve.contract.config import Config

PAGE = (Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \|", PAGE, re.MULTILINE)
NAMED = re.findall(r"`(server|transcriber|live|jobs)\.(\w+)\b", PAGE)


@pytest.mark.parametrize(("section", "key", "default"), ROWS, ids=lambda part: part)
def test_each_limit_has_the_default_that_the_page_says(section, key, default):
    assert getattr(getattr(Config(), section), key) == float(default)


def test_every_key_that_is_named_exists():
    for section, key in NAMED:
        assert hasattr(getattr(Config(), section), key), f"{section}.{key}"


def test_no_limit_is_left_out():
    """A new key that bounds what callers may do needs its row."""
    bounds = {
        f"{section}.{field.name}"
        for section in ("server", "transcriber", "live", "jobs")
        for field in dataclasses.fields(getattr(Config(), section))
        if field.name.startswith("max_") or field.name.endswith("_timeout_s")
    }
    assert bounds - {f"{section}.{key}" for section, key, _ in ROWS} == {"server.start_timeout_s"}
