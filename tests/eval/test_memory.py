"""Slopes with their intervals, and memory as it is sampled."""

import subprocess
import sys

import numpy as np
import psutil
import pytest

from eval.processes import Slope, Watch, resident_bytes, shared_memory_bytes, slope
from tests.serving import wait_until


def walk(rng, count):
    """Errors that resemble those before them."""
    errors = np.zeros(count)
    for i in range(1, count):
        errors[i] = 0.7 * errors[i - 1] + rng.normal()
    return errors


def test_a_line_is_found_exactly():
    found = slope(range(20), [7.0 + 3 * x for x in range(20)])
    assert (found.value, found.low, found.high) == pytest.approx((3, 3, 3), abs=1e-9)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng, x = np.random.default_rng(0), np.arange(60.0)
    found = [slope(x, 2 * x + walk(rng, 60)) for _ in range(400)]
    share = np.mean([one.low <= 2 <= one.high for one in found])
    # A short series tells its own error a little too small. Taken for independent, 60 %.
    assert 0.82 < share < 0.97, share


@pytest.mark.parametrize(
    ("interval", "passed"), [((1, 2), True), ((1, 4), True), ((3, 5), None), ((4.5, 9), False)]
)
def test_a_slope_is_judged_by_its_interval(interval, passed):
    assert Slope(sum(interval) / 2, *interval).within(4.0) is passed


TAKEN = 60 * 2**20
TAKER = f"""
import sys
sys.stdin.readline()
taken = b"x" * {TAKEN}
sys.stdin.readline()
"""


def test_memory_that_was_taken_is_seen():
    """In a process of its own: that of the tests may give back as much meanwhile."""
    with psutil.Popen([sys.executable, "-c", TAKER], stdin=subprocess.PIPE, text=True) as taker:
        with Watch(lambda: shared_memory_bytes([taker])) as watch:
            wait_until(lambda: watch.first_bytes, "nobody looked")
            before = watch.first_bytes
            taker.stdin.write("take\n")
            taker.stdin.flush()
            wait_until(lambda: watch.peak_bytes >= before + 20 * 2**20, "nobody saw it")
            wait_until(lambda: resident_bytes(taker) >= TAKEN, "it was not taken")
        taker.stdin.close()
        assert taker.wait(60) == 0


def test_a_process_that_has_ended_has_no_memory():
    gone = psutil.Popen(["true"])
    gone.wait()
    assert shared_memory_bytes([gone]) == 0
    assert resident_bytes(gone) == 0
