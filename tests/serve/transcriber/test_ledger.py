"""The ledger of requests: who is taken in, who is refused, and how they are counted."""

import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.errors import DeviceError, OverloadedError
from serve.runtime.protocol import DecodingOptions
from serve.transcriber.audio import MIB
from serve.transcriber.ledger import Ledger
from serve.transcriber.plan import Plan
from tests.harness import clock_of

PLAN = Plan((1,), "en", DecodingOptions(), False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test sets it."""
    now = [100.0]
    monkeypatch.setattr("serve.transcriber.ledger.time", clock_of(lambda: now[0]))
    return now


@pytest.fixture
def ledger():
    return Ledger(TranscriberConfig(max_pending=2, request_timeout_s=30.0))


def end(ledger, active, outcome="ok"):
    ledger.remove(active, outcome)
    ledger.mark_answered()


def test_requests_have_their_own_ids_and_deadlines(ledger, clock):
    first = ledger.accept(PLAN, print, 0)
    clock[0] = 105.0
    second = ledger.accept(PLAN, print, 0)
    assert first.id != second.id
    assert (first.plan, first.on_event) == (PLAN, print)
    assert (first.accepted_s, first.deadline_s) == (100.0, 130.0)
    assert (second.accepted_s, second.deadline_s) == (105.0, 135.0)


def test_the_oldest_is_the_first_that_is_pending(ledger):
    assert ledger.oldest() is None
    first, second = ledger.accept(PLAN, print, 0), ledger.accept(PLAN, print, 0)
    assert ledger.oldest() is first
    end(ledger, first)
    assert ledger.oldest() is second
    end(ledger, second)
    assert ledger.oldest() is None


def test_no_more_bytes_wait_than_may():
    """A request's audio counts until it is decoded, or its request ends."""
    ledger = Ledger(TranscriberConfig(max_audio_mb=2, max_pending_mb=2))
    first = ledger.accept(PLAN, print, MIB)
    second = ledger.accept(PLAN, print, MIB)
    with pytest.raises(OverloadedError, match=r"2\.0 MiB of audio wait .*max_pending_mb allows 2;"):
        ledger.accept(PLAN, print, 1)
    ledger.accept(PLAN, print, 0)
    ledger.mark_decoded(first)
    third = ledger.accept(PLAN, print, MIB)
    with pytest.raises(OverloadedError):
        ledger.accept(PLAN, print, 1)
    end(ledger, second)
    end(ledger, first)
    with pytest.raises(OverloadedError):
        ledger.accept(PLAN, print, MIB + 1)
    ledger.mark_decoded(second)
    end(ledger, third)
    ledger.accept(PLAN, print, 2 * MIB)


@pytest.mark.parametrize("outcome", ["ok", "failed", "cancelled", "timed_out"])
def test_each_outcome_is_counted_by_its_name(ledger, outcome):
    active = ledger.accept(PLAN, print, 0)
    active.duration_s = 7.0
    end(ledger, active, outcome)
    counters, pending = ledger.counters()
    names = ("ok", "failed", "cancelled", "timed_out")
    assert [getattr(counters, name) for name in names] == [name == outcome for name in names]
    assert counters.audio_s == (7.0 if outcome == "ok" else 0.0), "only answered audio counts"
    assert pending == []


def test_busy_time_is_that_with_something_pending(ledger, clock):
    first = ledger.accept(PLAN, print, 0)
    clock[0] = 101.0
    second = ledger.accept(PLAN, print, 0)
    clock[0] = 103.0
    assert ledger.counters()[0].busy_s == 3.0, "also while it lasts"
    end(ledger, first)
    clock[0] = 104.0
    end(ledger, second)
    clock[0] = 150.0
    assert ledger.counters()[0].busy_s == 4.0
    third = ledger.accept(PLAN, print, 0)
    clock[0] = 150.5
    end(ledger, third)
    assert ledger.counters()[0].busy_s == 4.5


def test_closed_stays_closed_and_the_failure_is_named(ledger):
    assert not ledger.closed
    ledger.close(DeviceError("out of memory"))
    assert ledger.closed
    ledger.close()
    ledger.drain(0.0)
    assert ledger.closed, "draining does not open it again"
    with pytest.raises(DeviceError, match=r"the device has failed.*out of memory"):
        ledger.accept(PLAN, print, 0)
