"""A Triton that takes another's place, or is away for a while: what becomes of requests."""

import json

import pytest

from serve.wire.folder import USED, is_held
from tests.gateways import WAIT_S, json_request, message, until


@pytest.fixture
def front(start):
    return start(idle_unload_s=60.0)


@pytest.fixture
def other(front):
    """Another stand-in, which no link names yet."""
    triton = front.make_triton("other")
    yield triton
    triton.close()


def exchange(front, triton):
    new = front.folder / "new"
    new.symlink_to(triton.folder)
    new.replace(front.links[0])


def test_new_requests_go_to_the_new_one_and_the_old_one_ends_what_it_has(front, other):
    under_way = front.call().future(message("wait"))
    until(lambda: front.triton.requests)
    exchange(front, other)
    front.call()(message("hello"), timeout=WAIT_S)
    assert (len(front.triton.requests), len(other.requests)) == (1, 1)
    assert is_held(front.triton.folder), "it has something to answer"
    front.triton.release()
    assert under_way.result(WAIT_S)
    until(lambda: not is_held(front.triton.folder))
    assert is_held(other.folder)


def test_a_cancel_goes_to_the_one_that_has_the_request(front, other):
    under_way = front.call().future(message("wait"))
    until(lambda: front.triton.requests)
    exchange(front, other)
    under_way.cancel()
    until(lambda: front.triton.cancelled)
    assert not other.cancelled
    until(lambda: not is_held(front.triton.folder))


def test_requests_wait_where_there_is_none_and_are_answered_by_the_next(front, other):
    front.links[0].unlink()
    calls = [front.call().future(message("hello")) for _ in range(3)]
    gone = front.call().future(message("hello"))
    until(lambda: front.door.admission.requests == 4)
    assert (front.folder / USED).is_file(), "the supervisor is told"
    assert front.ask("GET", "/health")[0] == 200
    gone.cancel()
    until(lambda: front.door.admission.requests == 3)
    assert not any(call.done() for call in calls) and not front.triton.requests
    exchange(front, other)
    assert all(call.result(WAIT_S) for call in calls)
    assert len(other.requests) == 3
    until(lambda: front.door.admission.requests == 0)


def test_a_request_that_waits_too_long_is_told_so(start):
    front = start(request_timeout_s=-29.5)  # half a second with what is granted beyond it
    front.links[0].unlink()
    status, error = front.infer(json.dumps(json_request()).encode())
    assert status == 503 and "no answer within 0.5 s" in error
