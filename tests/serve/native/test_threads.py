"""How many threads a CPU runtime computes with."""

import os

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.native.threads import Threads, busy_s

CORES = 4


class Machine:
    """Cores with a set load, and a clock that goes on by a second with every look."""

    def __init__(self, others):
        self.others = others
        self.now_s = self.busy = self.own = 0.0

    def clock(self):
        return self.now_s

    def look(self, threads):
        self.now_s += 1.0
        self.own += threads.count
        self.busy += threads.count + self.others
        threads.follow()
        return threads.count


@pytest.fixture
def threads_of(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()

    def make(machine, count=CORES):
        config = RuntimeConfig(threads=count)
        return Threads(config, lambda: machine.busy, lambda: machine.own, machine.clock, CORES)

    yield make
    torch.set_num_threads(before)


def test_a_thread_is_given_up_for_each_core_that_others_take(threads_of):
    machine = Machine(others=0.0)
    threads = threads_of(machine)
    assert machine.look(threads) == torch.get_num_threads() == CORES
    machine.others = 0.5  # a program that gets half of a core, since it shares one with a thread
    assert machine.look(threads) == torch.get_num_threads() == CORES - 1
    machine.others = CORES + 1.0
    assert machine.look(threads) == 1
    machine.others = 0.1
    assert machine.look(threads) == CORES


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
