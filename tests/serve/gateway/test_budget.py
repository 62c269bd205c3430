"""The loop's time: a connection that takes much of it waits, and no other does."""

import asyncio
import re
import time

import pytest

from serve.gateway.edge.budget import OWN_S, ConnectionBudget, SharedBudget, ThrottledConnection
from serve.wire.folder import gateway_alive
from serve.wire.liveness import heartbeat_age_s
from tests.gateways import until


class FakeLoop(asyncio.SelectorEventLoop):
    """Its time goes on as its tests say, and where it would wait, at once."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


@pytest.fixture
def loop():
    loop = FakeLoop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


def soon(loop, act, *arguments):
    """Done by the loop, as what asyncio calls is."""

    async def once():
        act(*arguments)

    loop.run_until_complete(once())


def throttled(shared, protocol):
    return ThrottledConnection(ConnectionBudget(shared), protocol)


class Costly:
    """A protocol that takes a moment for each piece."""

    def __init__(self, loop, piece_s, piece_bytes=10):
        self.loop, self.piece_s, self.piece_bytes = loop, piece_s, piece_bytes
        self.took_s, self.data = 0.0, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.loop.now += self.piece_s
        self.took_s += self.piece_s
        self.data += data


class Wire:
    """A transport that brings data as long as it is read."""

    def __init__(self, loop, data=b""):
        self.loop, self.data = loop, data
        self.reads = True

    def begin(self, gate):
        self.gate = gate
        gate.connection_made(self)
        self.bring()

    def bring(self):
        if self.reads and self.data:
            self.gate.data_received(self.data[: self.max_size])
            self.loop.call_later(1e-4, self.bring)

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        if not self.reads:
            self.reads = True
            self.loop.call_later(1e-4, self.bring)


@pytest.mark.parametrize("floods", [1, 4, 40])
def test_all_that_flood_have_a_third_together_and_each_as_much(loop, floods):
    shared = SharedBudget(loop.time)
    protocols = [Costly(loop, 0.001) for _ in range(floods)]
    for protocol in protocols:
        soon(loop, Wire(loop, bytes(1000)).begin, throttled(shared, protocol))
    loop.run_until_complete(asyncio.sleep(20.0))
    took = [protocol.took_s for protocol in protocols]
    assert sum(took) <= 1.05 * 20.0 / 3 + floods * 2 * OWN_S
    assert sum(took) > 5.0, "they are read all the same"
    assert max(took) <= 1.5 * min(took) + 0.01


def test_who_floods_not_is_heard_at_once(loop):
    shared = SharedBudget(loop.time)
    floods = [Wire(loop, bytes(1000)) for _ in range(40)]
    for wire in floods:
        soon(loop, wire.begin, throttled(shared, Costly(loop, 0.001)))
    honest = Costly(loop, 0.0001)
    gate = throttled(shared, honest)
    Wire(loop).begin(gate)
    for number in range(1, 20):
        loop.run_until_complete(asyncio.sleep(0.1))
        soon(loop, gate.data_received, b"0123456789")
        assert len(honest.data) == 10 * number
    assert shared.waiting >= 39


def test_what_is_to_be_paid_for_waits_its_turn(loop):
    shared = SharedBudget(loop.time)

    async def work(number):
        await ConnectionBudget(shared).pay(0.3)
        loop.now += 0.3
        done.append(number)

    async def all_of_them():
        await asyncio.gather(*map(work, range(4)))

    done = []
    loop.run_until_complete(all_of_them())
    assert done == [0, 1, 2, 3]
    assert loop.now >= 3 * (0.3 + 0.6) + 0.3
    began = loop.now
    loop.run_until_complete(ConnectionBudget(shared).pay(OWN_S / 2))
    assert loop.now == began


def test_the_page_tells_it_and_the_file_says_that_the_loop_goes_on(running):
    async def at_one_thing():
        time.sleep(0.3)

    running.run(at_one_thing())
    found = r"earshot_gateway_longest_turn_seconds (0\.[2-9]|[1-9])"
    until(lambda: re.search(found, running.page()))
    assert "earshot_gateway_waiting_turns 0.0" in running.page()
    assert heartbeat_age_s(gateway_alive(running.folder)) < 60.0
