"""How steps and encoder batches are launched, with graphs that only count their replays."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from serve.native import replay
from serve.native.encoders import SILENCE, GraphEncoder
from serve.native.graphs import GraphLoop
from serve.native.rules.state import RowState, new_state
from serve.native.slots import SlotPool
from tests.checkpoints import NANO


class Graph:
    """A captured piece of work: replaying it runs it."""

    def __init__(self, work, pool, stream):
        self.replay = work


class Copied:
    """An event that has always happened."""

    def record(self):
        pass

    def synchronize(self):
        pass


class Network:
    """Notes the steps' feeds and the batches' windows."""

    device = torch.device("cpu")
    dims = dataclasses.replace(NANO.dims, n_text_layer=8)  # two steps a launch for few slots

    def __init__(self):
        self.feeds, self.batches = [], []

    def step(self, feed, cache):
        self.feeds.append(feed)
        return feed.positions

    def encode(self, features):
        return features.mT[:, ::2]

    def fill_cross(self, encoded, cache, slots):
        self.batches.append((encoded.shape[0], encoded.shape[1], slots.tolist()))


class Cache:
    device = torch.device("cpu")
    short = None  # so of a short window all is projected, as on a GPU

    def __init__(self, nbytes=1 << 20):
        self.cross = torch.empty(nbytes, dtype=torch.int8, device="meta")


class Choice:
    """Lets everyone go on, and notes by which graphs."""

    def __init__(self):
        self.searching = []

    def advance(self, state, picks, logits):
        self.searching.append(picks.searching)
        state.position.add_(1)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(replay, "capture", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Copied)


def graph_loop(monkeypatch, slots, rows, nbytes=1 << 20, turns_of=lambda state: None):
    """A loop of up to 4 steps a launch, with its network and choice; `nbytes`: of the cache."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(RowState, "pinned", lambda self: new_state(rows, 16, cpu))
    network, choice, state = Network(), Choice(), new_state(rows, 16, cpu)
    parts = SimpleNamespace(network=network, cache=Cache(nbytes), state=state, rules=choice)
    loop = GraphLoop(parts, 4, slots, turns_of(state))
    loop.replay.record(None)
    return loop, network, choice


def busy(counts, slots=20, rows=20):
    owners = SlotPool(slots, rows)
    for job, count in enumerate(counts, 100):
        owners.acquire(job, count)
    return owners


@pytest.mark.parametrize(
    ("jobs", "span", "steps"),
    [(1, 1, 2), (2, 2, 2), (3, 4, 4), (9, 12, 4), (16, 16, 4), (17, 20, 4)],
)
def test_the_smallest_graph_that_reaches_every_busy_row_is_replayed(monkeypatch, jobs, span, steps):
    loop, network, choice = graph_loop(monkeypatch, 20, 20)
    assert loop.launch(busy([1] * jobs)) == steps
    assert [len(feed.rows) for feed in network.feeds] == [span] * steps
    feed = network.feeds[-1]
    assert (feed.source, feed.multi_token, feed.groups.max_count) == (None, False, 1)
    assert feed.groups.direct
    assert feed.groups.first[:jobs].tolist() == list(range(jobs))
    assert feed.groups.count.tolist() == [1] * jobs + [0] * (span - jobs)
    assert not any(choice.searching)


@pytest.mark.parametrize(("jobs", "steps"), [(3, 4), (8, 2), (12, 2), (16, 1), (20, 1)])
def test_a_launch_is_no_longer_than_the_host_needs(monkeypatch, jobs, steps):
    """With a cache of which a step of 20 slots reads 5 GiB."""
    loop, network, _ = graph_loop(monkeypatch, 20, 20, 5 << 30)
    assert loop.launch(busy([1] * jobs)) == steps
    assert len(network.feeds) == steps


def test_a_rehearsal_goes_once_through_what_will_be_captured(monkeypatch):
    loop, network, choice = graph_loop(monkeypatch, 10, 20)
    loop.replay.rehearse()
    spans = [len(feed.rows) for feed in network.feeds]
    assert sorted(spans) == [1, 1, 2, 2, 4, 4, 8, 8, 10, 12, 16, 20]
    assert choice.searching == [True] * 7 + [False] * 5


@pytest.mark.parametrize(
    ("counts", "span", "steps"), [([5], 8, 2), ([1, 5, 5, 1], 12, 2), ([5] * 4, 24, 4)]
)
def test_windows_of_several_rows_take_the_graphs_that_search(monkeypatch, counts, span, steps):
    loop, network, choice = graph_loop(monkeypatch, 10, 50)
    assert loop.launch(busy(counts, 10, 50)) == steps
    feed = network.feeds[-1]
    assert len(feed.rows) == span
    assert feed.source is not None
    assert (feed.groups.max_count, feed.groups.direct) == (8, False)
    assert feed.groups.count.tolist()[: len(counts)] == counts
    assert not feed.groups.count[len(counts) :].any()
    assert all(choice.searching)


def test_where_searches_are_possible_greedy_windows_still_have_their_own_graphs(monkeypatch):
    loop, network, choice = graph_loop(monkeypatch, 10, 50)
    loop.launch(busy([1, 1, 1], 10, 50))
    assert [len(feed.rows) for feed in network.feeds] == [4] * 4
    assert not any(choice.searching) and not network.feeds[-1].groups.direct
    slots = busy([5, 5, 5, 1], 10, 50)
    for job in (100, 101, 102):
        slots.release(job)
    loop.launch(slots)  # its row is beyond the graphs for one row a slot
    assert choice.searching[-1]
    assert network.feeds[-1].groups.first[0] == 15


def test_the_host_reads_one_launch_behind_and_each_snapshot_keeps_its_moment(monkeypatch):
    loop, _, _ = graph_loop(monkeypatch, 20, 20)
    slots = busy([1, 1, 1])
    loop.launch(slots)
    assert loop.read_snapshot() is None
    slots.release(101)
    loop.launch(slots)
    first = loop.read_snapshot()
    assert [(place.slot, job) for place, job in first.owners] == [(0, 100), (1, 101), (2, 102)]
    loop.launch(slots)
    second = loop.read_snapshot()
    assert [(place.slot, job) for place, job in second.owners] == [(0, 100), (2, 102)]
    assert (int(first.state.position[0]), int(second.state.position[0])) == (4, 8)
    assert loop.read_snapshot() is None
    loop.discard_launched()
    loop.launch(slots)
    assert loop.read_snapshot() is None  # what was launched before is gone


def test_encoder_batches_are_powers_of_two_and_the_most():
    network = Network()
    encoder = GraphEncoder(network, [(network, Cache())] * 2, 6)
    encoder.replay.record(None)
    batches = {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 6, 50: 6}
    assert {waiting: encoder.batch_of(waiting) for waiting in batches} == batches
    windows = [torch.full((NANO.dims.n_mels, 3000), float(i)) for i in range(2)]
    encoder.encode(windows, [7, 3])
    assert network.batches == [(2, 1500, [7, 3])] * 2  # for each decoder


def test_graphs_encode_short_windows_as_silence_behind_them_would_be():
    network = Network()
    encoder = GraphEncoder(network, [(network, Cache())], 2)
    encoder.replay.record(None)
    padded = {2: 1000, 1000: 1000, 1002: 1500, 2600: 3000}
    assert {frames: encoder.frames_of(frames) for frames in padded} == padded
    filled, seen = [], network.encode
    network.fill_cross = lambda encoded, *_: filled.append(encoded)
    network.encode = lambda features: seen(features) + 1
    windows = [torch.full((NANO.dims.n_mels, n), mel) for n, mel in ((1000, 5.0), (400, 7.0))]
    encoder.encode(windows, [0, 1])
    assert filled[0].shape[:2] == (2, NANO.dims.n_audio_ctx)
    assert filled[0][:, :500].unique().tolist() == [6.0, 8.0]
    assert filled[0][:, 500:].unique().tolist() == [SILENCE + 1]


class Turns:
    """Turns in which one guess of three is right."""

    count = 3

    def __init__(self, state):
        self.state, self.spans = state, []

    def layout_of(self, rows):
        return rows

    def run(self, layout, table, length):
        self.spans.append(len(layout))
        self.state.position.add_(2)


def test_windows_that_do_not_search_take_turns_and_guesses_are_counted(monkeypatch):
    loop, network, choice = graph_loop(monkeypatch, 10, 50, turns_of=Turns)
    turns = loop._speculative_step
    turns.state.finished.fill_(False)
    single, mixed = busy([1, 1, 1], 10, 50), busy([1, 5], 10, 50)
    for _ in range(4):
        assert loop.launch(single) == 1
        loop.read_snapshot()
    assert turns.spans == [4] * 4 and not network.feeds
    assert (loop.drafted, loop.accepted) == (18, 6)  # of three snapshots two follow one
    loop.discard_launched()
    for _ in range(3):
        loop.launch(mixed)
        loop.read_snapshot()
    assert len(turns.spans) == 4 and all(choice.searching)
    assert (loop.drafted, loop.accepted) == (18, 6)
