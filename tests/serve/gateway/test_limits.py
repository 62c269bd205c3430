"""Requests, bytes and streams under way: each counts once, up to its limit and not beyond."""

import pytest

from serve.contract.server_config import LiveConfig, ServerConfig
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey
from serve.gateway.limits import (
    MAX_MARKS,
    MAX_NUMBERS,
    Admission,
    PendingBytes,
    StreamSlots,
    check_json,
)

MIB = 2**20


@pytest.fixture
def admission():
    return Admission(ServerConfig(max_request_mb=2, max_inflight_mb=3))


def test_a_key_has_as_many_requests_at_once_as_it_may(admission):
    alice, bob = ApiKey("alice"), ApiKey("bob")
    alice.max_requests = 2
    for _ in range(3):  # what has ended leaves room
        permits = [admission.admit(alice) for _ in range(2)]
        with pytest.raises(ApiError, match="alice has used up its requests_at_once"):
            admission.admit(alice)
        admission.admit(bob).release()
        for permit in permits:
            permit.release()
    assert (alice.requests, admission.requests) == (0, 0)


def test_bytes_count_up_to_the_limits_of_a_request_and_of_all(admission):
    with admission.admit(ApiKey("")) as first, admission.admit(ApiKey("")) as second:
        first.charge(2 * MIB)
        with pytest.raises(ApiError, match=f"{2 * MIB + 1} bytes or more"):
            first.charge(1)
        second.charge(MIB)
        with pytest.raises(ApiError, match=r"requests in flight hold 3 MiB, the maximum is 3"):
            second.charge(1)
    assert admission.bytes == 0


def test_bytes_of_a_connection_that_are_no_request_yet_count_as_often_as_they_come(admission):
    unfinished = PendingBytes(admission)
    for size in (MIB, 2 * MIB, MIB):
        unfinished.set(size)
        assert admission.bytes == size
    admission.bytes += 2 * MIB  # others'
    with pytest.raises(ApiError, match="in flight hold"):
        unfinished.set(MIB + 1)
    unfinished.set(0)
    assert admission.bytes == 2 * MIB


def test_a_key_has_as_many_streams_as_it_may():
    streams, account = StreamSlots(LiveConfig()), ApiKey("alice")
    account.max_streams = 1
    for _ in range(2):
        with streams.register(account, print):
            with pytest.raises(ApiError, match="live_streams"), streams.register(account, print):
                pass
            assert len(streams) == account.streams == 1
    assert len(streams) == account.streams == 0


@pytest.mark.parametrize(
    ("most", "one_more"),
    [(b"," * MAX_NUMBERS, b","), (b'"' * MAX_MARKS, b"["), (b"{" * MAX_MARKS, b'"')],
    ids=["commas", "quotation marks", "brackets"],
)
def test_json_has_as_many_numbers_or_texts_as_it_may(most, one_more):
    check_json(most, "the body")
    with pytest.raises(ApiError, match="the body has"):
        check_json(most + one_more, "the body")
