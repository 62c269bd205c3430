"""The least work of a window, counted by hand."""

import dataclasses

import pytest

from eval.bench.floor import Floor, encoder_work, step_bytes
from eval.bench.table import Measurement, table_of
from eval.random_whisper import PUBLISHED
from serve.contract.config import RuntimeConfig
from tests.eval.bench.conftest import CEILINGS

TURBO = PUBLISHED["large-v3-turbo"].dims


def test_the_least_work_is_what_a_count_by_hand_gives():
    # 32 layers of 2 x 1500 x 12 x 1280^2 and 4 x 1500^2 x 1280, convolutions, cross K and V
    for dims, cross in ((TURBO, 39.3e9), (PUBLISHED["large-v3"].dims, 314.6e9)):
        expected = (1887e9, 368.6e9, 17.7e9 + cross)
        assert encoder_work(dims) == pytest.approx(expected, rel=2e-3)
    # 91.8 M + 66.4 M weights; 30.7 MB + 1.3 MB of keys and values per slot
    for arguments, expected in (
        (("fp16", "full", 0, 0), 2 * 158.2e6),
        (("int8", "full", 64, 64), 158.2e6 + 64 * (30.72e6 + 1.31e6)),
        (("int8", "int8", 64, 64), 158.2e6 + 64 * (15.36e6 + 1.31e6)),
    ):
        assert step_bytes(TURBO, *arguments) == pytest.approx(expected, rel=2e-3)


def test_the_floor_of_a_window_is_its_encoding_and_its_share_of_the_steps(engine):
    manifest = dataclasses.replace(engine.manifest, dims=TURBO)
    full = Floor(manifest, RuntimeConfig(), CEILINGS)
    # 1887 GFLOP at 800 T, 368.6 at 400 T, 57 at 800 T
    assert 1e3 * full.encode_s == pytest.approx(2.359 + 0.922 + 0.071, rel=1e-3)
    # 131 steps of (158.2 MB / 64 + 30.72 MB + 66 x 20.5 kB) at 4 TB/s
    assert 1e3 * (full.window_s(128, 64) - full.encode_s) == pytest.approx(1.131, rel=2e-3)
    fast = Floor(manifest, RuntimeConfig(cross_kv="int8"), CEILINGS, fp8=True)
    assert 1e3 * fast.encode_s == pytest.approx(2.359 / 2 + 0.922 + 0.071, rel=1e-3)
    assert 1e3 * (fast.window_s(128, 64) - fast.encode_s) == pytest.approx(0.628, rel=2e-3)


# ---------------------------------------------------------------- table


def test_the_table_shows_the_share_of_the_ideal_and_the_ratio_to_peers():
    figures = {"p50_ms": 0.25, "requests": 200}
    rows = [
        Measurement("throughput", "earshot, 64 slots", 3000.0, "RTFx", 6000.0, "n 7", figures),
        Measurement("throughput", "earshot, 256 slots", 4000.0, "RTFx", 6000.0),
        Measurement("latency", "earshot, 64 slots", 20.0, "ms", 5.0),
        Measurement("throughput", "peer", 1000.0, "RTFx", None),
        Measurement("latency", "peer", 50.0, "ms", None),
        Measurement("latency", "other", None, "ms", None, "refused: it is not installed"),
    ]
    cells = table_of(rows).rows
    assert cells[0][2:] == ["3000 RTFx", "6000", "50 %", "", "n 7; p50 ms 0.25, requests 200"]
    assert (cells[2][4], cells[3][5], cells[4][5]) == ("25 %", "4.00 x", "2.50 x")
    assert cells[5][2:] == ["- ms", "", "", "", "refused: it is not installed"]
