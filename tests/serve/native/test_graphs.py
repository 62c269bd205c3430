"""How steps and encoder batches are launched, with graphs that only count their replays."""

import pytest
import torch

from serve.native import graphs
from serve.native.graphs import EagerEncoder, EagerLoop, GraphEncoder, GraphLoop
from serve.native.rules.definition import SlotState, new_state
from serve.native.slots import Slots
from tests.fake_trtllm.install import DIMS


class Graph:
    """A captured piece of work: replaying it runs it."""

    def __init__(self, work, pool):
        self.replay = work


class Copied:
    """An event that has always happened."""

    def record(self):
        pass

    def synchronize(self):
        pass


class Network:
    """Notes the slots of its steps and the windows of its batches."""

    device = torch.device("cpu")

    def __init__(self):
        self.spans, self.batches = [], []

    def step(self, ids, positions, cache):
        self.spans.append(len(positions))
        return positions

    def encode(self, features):
        return features

    def fill_cross(self, encoded, cache, slots):
        self.batches.append((len(encoded), slots.tolist()))


class Cache:
    """Notes how far it was cut."""

    def __init__(self):
        self.lengths = []

    def up_to(self, length):
        self.lengths.append(length)
        return self


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "_capture", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Copied)


@pytest.fixture
def loop(monkeypatch):
    """A loop of 20 slots and 4 steps a launch, with its network and state."""
    monkeypatch.setattr(SlotState, "pinned", lambda self: new_state(20, 16, torch.device("cpu")))
    network, state = Network(), new_state(20, 16, torch.device("cpu"))

    def advance(state, logits):
        state.position.add_(1)

    return GraphLoop(network, Cache(), state, advance, steps=4), network, state


def busy(count):
    slots = Slots(20)
    for job in range(count):
        slots.acquire(100 + job)
    return slots


@pytest.mark.parametrize(
    ("jobs", "span", "steps"),
    [(1, 1, 1), (2, 2, 1), (3, 4, 4), (9, 12, 4), (16, 16, 4), (17, 20, 4)],
)
def test_the_smallest_graph_that_reaches_every_busy_slot_is_replayed(loop, jobs, span, steps):
    loop, network, _ = loop
    assert loop.launch(busy(jobs)) == steps
    assert network.spans == [span] * steps


def test_the_host_reads_one_launch_behind_and_each_snapshot_keeps_its_moment(loop):
    loop, _, _ = loop
    slots = busy(3)
    loop.launch(slots)
    assert loop.read_snapshot() is None
    slots.release(101)
    loop.launch(slots)
    first = loop.read_snapshot()
    assert first.owners == [(0, 100), (1, 101), (2, 102)]
    loop.launch(slots)
    second = loop.read_snapshot()
    assert second.owners == [(0, 100), (2, 102)]
    assert (int(first.state.position[0]), int(second.state.position[0])) == (4, 8)
    assert loop.read_snapshot() is None
    loop.discard_launched()
    loop.launch(slots)
    assert loop.read_snapshot() is None  # what was launched before is gone


def test_an_eager_loop_reads_no_further_than_the_oldest_slot():
    network, cache, state = Network(), Cache(), new_state(4, 16, torch.device("cpu"))
    state.position[:3] = torch.tensor([2, 9, 4])
    loop = EagerLoop(network, cache, state, lambda state, logits: None)
    assert loop.read_snapshot() is None
    assert loop.launch(busy(2)) == 1
    assert (network.spans, cache.lengths) == ([2], [10])
    assert loop.read_snapshot().owners == [(0, 100), (1, 101)]
    assert loop.read_snapshot() is None
    loop.launch(busy(2))
    loop.discard_launched()
    assert loop.read_snapshot() is None


def test_encoder_batches_are_powers_of_two_and_the_most():
    network = Network()
    encoder = GraphEncoder(network, Cache(), DIMS, 6)
    assert [encoder.batch_of(waiting) for waiting in (1, 2, 3, 4, 5, 6, 50)] == [
        1,
        2,
        2,
        4,
        4,
        6,
        6,
    ]
    windows = [torch.full((DIMS.n_mels, 3000), float(i)) for i in range(2)]
    encoder.encode(windows, [7, 3])
    assert network.batches == [(2, [7, 3])]


def test_an_eager_encoder_takes_what_waits_up_to_its_most():
    network = Network()
    encoder = EagerEncoder(network, Cache(), 3)
    assert [encoder.batch_of(waiting) for waiting in (1, 3, 9)] == [1, 3, 3]
    encoder.encode([torch.zeros(DIMS.n_mels, 3000)], [2])
    assert network.batches == [(1, [2])]
