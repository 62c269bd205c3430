"""The table: shares of the ideal and ratios to peers."""

from eval.bench.table import Measurement, table_of


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
