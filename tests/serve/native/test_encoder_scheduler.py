"""Windows on their way to a slot, encoded in turns with the steps or beside them."""

import collections
from types import SimpleNamespace

import pytest
import torch

from serve.native import encoder_scheduler
from serve.native.encoder_scheduler import EncoderScheduler
from serve.native.slots import SlotPool
from serve.runtime.protocol import DecodingOptions, Job

BATCH = 4


class Encoder:
    """Notes which slots were filled by each batch."""

    def __init__(self):
        self.filled = []

    def frames_of(self, frames):
        return frames

    def batch_of(self, waiting):
        return min(waiting, BATCH)

    def encode(self, features, slots):
        self.filled.append(slots)


class Starter:
    """Notes which jobs had their prompts fed together."""

    def __init__(self):
        self.written, self.fed = [], []

    def write(self, begun):
        self.written = begun

    def start(self, begun):
        assert begun == self.written
        self.fed.append([one.job.id for one in begun])


class Stopwatch:
    """Of a device that is done when it is told so."""

    is_finished = True

    def __init__(self, device, phase=""):
        pass

    def stop(self):
        pass

    def seconds(self):
        return 0.0


class Harness:
    """An intake as on a GPU that encodes beside steps."""

    def __init__(self, slots=16, target_s=0.05):
        self.encoder, self.starter = Encoder(), Starter()
        self.slots = SlotPool(slots, slots)
        device = torch.device("meta")  # no CPU, which takes turns in another way
        self.intake = EncoderScheduler(
            *(self.encoder, self.starter, self.slots, BATCH, device, None),
            concurrent=True,
            decode_target_s=target_s,
        )
        self.running = collections.OrderedDict()

    def add(self, *ids, draft=()):
        for id in ids:
            options = DecodingOptions(max_tokens=8)
            self.intake.add(Job(id, torch.zeros(1), (1, 2), options, draft=draft))

    def begin(self):
        begun = self.intake.begin(list(self.running.values()))
        self.running.update((one.job.id, one) for one in begun)
        return [one.job.id for one in begun]

    def submit(self, *ids, draft=()):
        """Add windows; returns those that begin."""
        self.add(*ids, draft=draft)
        return self.begin()

    def end(self, *ids):
        for id in ids:
            del self.running[id]
            self.slots.release(id)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test sets it."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(encoder_scheduler, "time", clock)
    monkeypatch.setattr(encoder_scheduler, "Stopwatch", Stopwatch)
    monkeypatch.setattr(Stopwatch, "is_finished", True)
    return clock


def test_windows_without_guesses_are_waited_for(clock, monkeypatch):
    harness = Harness()
    monkeypatch.setattr(Stopwatch, "is_finished", False)
    assert harness.submit(1, 2) == [1, 2]
    assert harness.submit(3) == [3]
    assert harness.starter.fed == [[1, 2], [3]]


def test_fewer_than_decode_wait_while_those_have_decoded_for_long(clock):
    harness = Harness()
    harness.submit(1, 2, 3)
    assert harness.submit(4) == [4]  # they have only begun
    clock.now = 0.1
    assert harness.submit(5, 6, 7) == []
    assert harness.submit(8) == [5, 6, 7, 8]
    clock.now = 0.2
    assert harness.submit(*range(9, 16)) == []
    harness.end(1)
    assert harness.begin() == [9, 10, 11, 12]


def test_three_batches_wait_for_nobody(clock):
    harness = Harness(slots=64)
    for first in range(0, 40, 4):
        harness.submit(*range(first, first + 4))
    clock.now = 0.1
    assert harness.submit(*range(100, 111)) == []
    assert harness.submit(111) == [100, 101, 102, 103]
    assert harness.begin() == []  # two batches are left, and four more decode


def test_slots_that_can_all_be_filled_are(clock):
    harness = Harness()
    for first in range(0, 16, 4):
        harness.submit(*range(first, first + 4))
    clock.now = 0.1
    assert harness.submit(20, 21, 22, 23, 24) == []
    harness.end(0, 1, 2)
    assert harness.begin() == []  # a whole batch has no place
    harness.end(3)
    assert harness.begin() == [20, 21, 22, 23]


def test_guesses_are_encoded_beside_the_steps(clock, monkeypatch):
    harness = Harness()
    assert harness.submit(1) == [1]
    monkeypatch.setattr(Stopwatch, "is_finished", False)
    assert harness.submit(2, 3, draft=(7,)) == []
    assert harness.encoder.filled == [[0], [1, 2]]
    assert [id for _, id in harness.slots.owners()] == [1]  # the others are not stepped
    assert harness.slots.row_end == 1
    assert harness.submit(4, 5, draft=(7,)) == []
    assert harness.submit(6, draft=(7,)) == []  # two batches are ahead
    assert len(harness.encoder.filled) == 3
    monkeypatch.setattr(Stopwatch, "is_finished", True)
    assert harness.begin() == [2, 3, 4, 5]
    assert [id for _, id in harness.slots.owners()] == [1, 2, 3, 4, 5]
    assert harness.begin() == [6]
    assert harness.intake.windows == 6


def test_a_device_that_has_nothing_else_is_waited_for(clock, monkeypatch):
    harness = Harness()
    harness.submit(1)
    monkeypatch.setattr(Stopwatch, "is_finished", False)
    assert harness.submit(2, draft=(7,)) == []
    harness.end(1)
    assert harness.begin() == [2]


def test_who_leaves_while_encoded_frees_the_slot_and_is_never_started(clock, monkeypatch):
    harness = Harness()
    harness.submit(1)
    monkeypatch.setattr(Stopwatch, "is_finished", False)
    harness.submit(2, 3, draft=(7,))
    assert harness.intake.remove(2)
    assert not harness.intake.remove(2)
    assert harness.slots.busy == 2
    monkeypatch.setattr(Stopwatch, "is_finished", True)
    assert harness.begin() == [3]
    assert harness.starter.fed == [[1], [3]]
    harness.add(4, draft=(7,))
    monkeypatch.setattr(Stopwatch, "is_finished", False)
    harness.begin()
    harness.intake.clear()
    assert harness.slots.busy == 2
    assert harness.begin() == []
