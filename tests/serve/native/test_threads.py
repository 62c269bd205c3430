"""How many threads a CPU runtime computes with."""

import math
import os

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.native import threads
from serve.native.threads import Threads, busy_s

CORES = 4


class Machine:
    """Cores with a set load, and a clock that goes on by a second with every look."""

    def __init__(self, others):
        self.others = others
        self.now_s = self.busy = self.own = 0.0

    def look(self, made):
        self.now_s += 1.0
        self.own += made.count
        self.busy += made.count + self.others
        made.adapt()
        return made.count


@pytest.fixture
def threads_of(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))

    def make(machine, count=CORES):
        monkeypatch.setattr(threads, "_reading", lambda: (machine.now_s, machine.busy, machine.own))
        monkeypatch.setattr(threads, "_READ_INTERVAL_S", -math.inf)  # each look counts
        return Threads(RuntimeConfig(threads=count))

    yield make
    torch.set_num_threads(before)


def test_a_thread_is_given_up_for_each_core_that_others_take(threads_of):
    machine = Machine(others=0.0)
    made = threads_of(machine)
    assert machine.look(made) == torch.get_num_threads() == CORES
    machine.others = 0.5  # a program that gets half of a core, since it shares one with a thread
    assert machine.look(made) == torch.get_num_threads() == CORES - 1
    machine.others = CORES + 1.0
    assert machine.look(made) == 1
    machine.others = 0.1
    assert machine.look(made) == CORES


def test_no_more_threads_than_were_asked_for(threads_of, monkeypatch):
    machine = Machine(others=-3.0)
    assert machine.look(threads_of(machine, 1)) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine.look(threads_of(machine, 0)) == 1


def test_the_load_of_the_cores_is_counted():
    before, own = busy_s(), sum(os.times()[:2])
    while sum(os.times()[:2]) < own + 0.3:
        pass
    assert busy_s() - before > 0.2
