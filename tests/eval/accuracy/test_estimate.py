from eval.accuracy.run import Cost, estimate_line, total_line, windows
from tests.eval.fakes import timed_call


def test_a_window_costs_what_warm_calls_took():
    calls = [
        timed_call("first", "", "", latency_s=9.0),  # warms up
        timed_call("short", "", "", duration_s=2.0, latency_s=1.0),
        timed_call("long", "", "", duration_s=61.0, latency_s=6.0),  # three windows
    ]
    assert Cost.of(2.0, calls) == Cost(2.0, 1.5)
    assert Cost.of(2.0, calls[:1]).window_s == 9.0
    assert [windows(s) for s in (0.1, 30.0, 30.1, 90.0)] == [1, 1, 2, 3]


def test_all_that_is_left_is_added_up():
    costs = {"a": (Cost(30.0, 1.5), 60), "b": (Cost(0.0, 3.0), 20)}
    assert "about   2.0 minutes: 60 windows of 1.50 s" in estimate_line("a", *costs["a"])
    assert "about   3.0 minutes, if nothing else runs here" in total_line(costs)
    assert total_line({}) == "nothing is left to be heard"
