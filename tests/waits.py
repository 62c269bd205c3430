"""How tests wait: for a condition, never for time. Child processes import this, so it is small."""

import time

WAIT_S = 60.0
"""A guard against hanging; no test asserts that something is quicker."""


def wait_until(condition, what="it never came true", timeout_s=WAIT_S, look_s=0.05):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(look_s)
