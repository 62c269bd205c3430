"""A gateway with several engines, each of which is a stand-in for Triton."""

import asyncio
import json
from unittest import mock

import grpc
import pytest

from serve.gateway.engines import infer
from tests.gateways import WAIT_S, message, until

TWO = ("cuda:0", "cuda:1")


def counts(running):
    """The requests that each stand-in has had."""
    return [len(triton.requests) for triton in running.tritons]


def test_of_several_engines_the_next_gets_what_one_lost_with_its_file(start):
    running = start(devices=TWO)
    first, second = running.tritons
    audio = bytes(range(256)) * 2**13
    # As Triton's calls end where it is killed.
    lost = running.transcribe(prompt="error:UNAVAILABLE Socket closed", audio=audio)
    assert lost[0] == 503  # both have had it
    for triton in (first, second):
        (file,) = triton.files.values()
        assert file[: len(file)] == audio
    calls = [running.call().future(message("wait")) for _ in range(4)]
    until(lambda: len(first.waiting) == len(second.waiting) == 2)
    for device in TWO:
        assert f'upstream_inflight_requests{{upstream="{device}"}} 2.0' in running.page()
    first.beat(age_s=100.0)  # it stands still
    assert running.transcribe()[0] == 200 and len(second.requests) == 4
    health = json.loads(running.ask("GET", "/health")[2])
    assert health == {"status": "ok", "engines": {"cuda:0": False, "cuda:1": True}}
    assert 'takes_requests{model="demo",upstream="cuda:0"} 0.0' in running.page()
    for triton in running.tritons:
        triton.release()
    assert all(call.result(WAIT_S) for call in calls)
    assert list(running.services.engines.uploads.iterdir()) == []


def test_what_has_not_begun_goes_to_another_where_one_dies(start):
    running = start(devices=TWO)
    first, second = running.tritons
    calls = [running.call().future(message("wait")) for _ in range(2)]
    until(lambda: counts(running) == [1, 1])
    first.stop()
    until(lambda: len(second.requests) == 2)
    second.release()
    assert all(call.result(WAIT_S) for call in calls)
    assert 'upstream_requests_total{status="UNAVAILABLE",upstream="cuda:0"} 1.0' in running.page()
    first.cancelled_calls = 0  # by its own end
    first.start()


def test_what_has_begun_does_not(start):
    running = start(devices=TWO)
    status, _, answer = running.transcribe(prompt="late:UNAVAILABLE Socket closed", stream="true")
    assert status == 200 and b"transcript.text.delta" in answer
    assert b'"server_unavailable"' in answer and sorted(counts(running)) == [0, 1]


@pytest.mark.parametrize(
    ("error", "status", "engines"),
    [("OverloadedError: full", 429, 3), ("UNAVAILABLE lost", 503, 2), ("OptionError: no", 400, 1)],
    ids=["full: all are asked", "lost: two at most", "the request's fault: one"],
)
def test_how_many_engines_a_request_that_fails_gets(start, error, status, engines):
    running = start(devices=("cuda:0", "cuda:1", "cuda:2"))
    assert running.transcribe(prompt=f"error:{error}")[0] == status
    assert sum(counts(running)) == engines


LARGE = bytes(2**20 + 1)


@pytest.mark.parametrize(
    ("lost_at", "error"),
    [
        ("write", asyncio.InvalidStateError("RPC already finished.")),
        ("done_writing", grpc.aio.InternalError("Failed execute_batch")),
    ],
)
def test_a_server_lost_while_it_takes_a_large_request_is_away(lost_at, error):
    """Where a message meets the call's end, gRPC's own error hides how the call ended."""
    ended = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, *2 * (grpc.aio.Metadata(),))
    call = mock.MagicMock(write=mock.AsyncMock(), done_writing=mock.AsyncMock())
    getattr(call, lost_at).side_effect = error
    call.__aiter__.side_effect = ended

    async def ask():
        async for _ in infer(None, lambda: call, LARGE, False):
            pass

    with pytest.raises(grpc.aio.AioRpcError) as lost:
        asyncio.run(ask())
    assert lost.value is ended
