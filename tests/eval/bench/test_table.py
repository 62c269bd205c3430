"""The table: shares of the ideal and ratios to peers."""

from eval.bench.table import Measurement, render


def test_the_table_shows_the_share_of_the_ideal_and_the_ratio_to_peers():
    rows = [
        Measurement("throughput", "earshot, 64 slots", 3000.0, "RTFx", 6000.0, "n 7"),
        Measurement("throughput", "earshot, 256 slots", 4000.0, "RTFx", 6000.0),
        Measurement("latency", "earshot, 64 slots", 20.0, "ms", 5.0),
        Measurement("throughput", "peer", 1000.0, "RTFx", None),
        Measurement("latency", "peer", 50.0, "ms", None),
        Measurement("latency", "other", None, "ms", None, "refused: it is not installed"),
    ]
    _, *lines = render(rows)
    assert lines[0].split()[-4:] == ["50", "%", "n", "7"]
    assert lines[2].split()[-2:] == ["25", "%"]
    assert lines[3].split()[-2:] == ["4.00", "x"]
    assert lines[4].split()[-2:] == ["2.50", "x"]
    assert lines[5].split()[2:] == "- ms - refused: it is not installed".split()
