"""The load generator: when items begin, and what ends it."""

import contextlib
import threading
import time

import pytest

from eval.load import RequestProcesses, closed_loop, open_loop, poisson, processes_for
from serve.contract.errors import AudioError


def test_a_closed_loop_keeps_so_many_in_work():
    done, barrier = [], threading.Barrier(3)

    def work(item):
        if item < 3:
            barrier.wait(60)  # all three threads are at work
        done.append((item, threading.get_ident()))

    closed_loop(work, range(10), at_once=3)
    items, threads = zip(*done, strict=True)
    assert sorted(items) == list(range(10)) and len(set(threads)) == 3


def test_a_closed_loop_ends_when_it_is_told_or_something_breaks():
    stop, done = threading.Event(), []

    def work(item):
        done.append(item)
        if len(done) == 5:
            stop.set()

    closed_loop(work, iter(int, 1), at_once=1, stop=stop)
    assert len(done) == 5

    def broken(item):
        raise AudioError("broken")

    with pytest.raises(AudioError, match="broken"):
        closed_loop(broken, iter(int, 1), at_once=2)


def test_an_open_loop_repeats_items_and_begins_none_after_its_end():
    tries = []

    def work(item):
        tries.append(item)
        return 0.0 if tries.count("again") < 3 and item == "again" else None

    open_loop(work, [(0.0, "again"), (0.01, "other")], seconds=60)
    assert (tries.count("again"), tries.count("other")) == (3, 1)
    open_loop(work, [(1000.0, "late")], seconds=0.05)
    assert "late" not in tries


def test_arrivals_are_the_same_for_a_seed_and_have_their_rate():
    times = poisson(50.0, 100.0, 3)
    assert times == poisson(50.0, 100.0, 3) != poisson(50.0, 100.0, 4)
    assert times[-2] < 100.0 <= times[-1] and len(times) == pytest.approx(5000, rel=0.1)


def test_requests_are_shared_out_between_processes(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [processes_for(n) for n in (1, 5, 72)] == [1, 5, 6]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert processes_for(72) == 1


@contextlib.contextmanager
def counting(limit, process):
    """Requests that answer their number, and fail beyond a limit."""

    def ask(number):
        time.sleep(0.001)
        if number >= limit:
            raise AudioError(f"{number} is too many")
        return process, number

    yield ask


def test_processes_answer_until_they_are_told_to_stop():
    answered = []
    with RequestProcesses(counting, (10**9,), 3, 2) as clients:
        while {process for process, _ in answered} != {0, 1}:
            answered += clients.answers()
        answered += clients.finish()
    for process in (0, 1):
        numbers = sorted(number for where, number in answered if where == process)
        assert numbers == list(range(len(numbers))) and numbers


def test_a_request_that_fails_ends_them():
    with (
        pytest.raises(AudioError, match="5 is too many"),
        RequestProcesses(counting, (5,), 1, 1) as clients,
    ):
        while clients.answers():
            pass
