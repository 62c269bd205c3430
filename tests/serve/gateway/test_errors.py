"""How errors, and reasons of the gateway's own, are answered at each door."""

import json

import grpc
import pytest

from serve.contract import errors
from serve.contract.errors import OverloadedError, RequestError
from serve.gateway.errors import ApiError
from tests.gateways import INFER, TRANSCRIPTIONS, WAIT_S, message
from tests.serve.gateway.live.sessions import session

INVALID, LATER = "INVALID_ARGUMENT", "UNAVAILABLE"
BAD, FAILED = "invalid_request_error", "server_error"
# gRPC's status, that of KServe's HTTP, that of OpenAI's API, its type, its code, a WebSocket's.
ROWS = {
    "EarshotError": ("INTERNAL", 500, 500, FAILED, "server_error", 1011),
    "ConfigError": ("INTERNAL", 500, 500, FAILED, "server_error", 1011),
    "UnavailableError": (LATER, 503, 503, FAILED, "server_unavailable", 1008),
    "OverloadedError": (LATER, 503, 429, "rate_limit_error", "overloaded", 1008),
    "RequestError": (INVALID, 400, 400, BAD, None, 1008),
    "AudioError": (INVALID, 400, 400, BAD, "invalid_audio", 1008),
    "CutShortError": (INVALID, 400, 400, BAD, "audio_cut_short", 1008),
    "AudioLimitError": (INVALID, 400, 422, BAD, "audio_limit_exceeded", 1008),
    "AccessError": ("UNAUTHENTICATED", 401, 401, BAD, "invalid_api_key", 1008),
    "draining": (LATER, 503, 503, FAILED, "draining", 1012),
    "slow_upload": (LATER, 503, 408, BAD, "upload_timeout", 1008),
    "key_limit": (LATER, 503, 429, "rate_limit_error", "rate_limit_exceeded", 1008),
    "insufficient_quota": ("RESOURCE_EXHAUSTED", 429, 429, *2 * ("insufficient_quota",), 1008),
    "too_large": ("RESOURCE_EXHAUSTED", 413, 413, BAD, "request_too_large", 1008),
    "session_expired": (INVALID, 400, 400, BAD, "session_expired", 1001),
}
SAID = "what is wrong"


def refusal_of(name):
    """For the name of an error's class, or of a reason."""
    if hasattr(errors, name):
        return ApiError(getattr(errors, name)(SAID))
    return ApiError((OverloadedError if wait_of(ROWS[name]) else RequestError)(SAID), name)


def wait_of(row):
    """What the header Retry-After says."""
    return "1" if row[0] == LATER or row[1] == 429 else None


@pytest.mark.parametrize(("name", "row"), ROWS.items())
def test_every_door_tells_it_in_its_own_way(shared, monkeypatch, name, row):
    def no_one(authorization_or_caller):
        raise refusal_of(name)

    refusal = refusal_of(name)
    kind = type(refusal.error).__name__
    with session(shared) as client:
        monkeypatch.setattr(shared.services.keys, "identify", no_one)
        monkeypatch.setattr(shared.services.keys, "require_good", no_one)
        client.say("input_audio_buffer.clear")
        error = client.next()["error"]
        assert (error["message"], error["type"], error["code"]) == (SAID, row[3], refusal.reason)
        assert (client.end(), client.socket.close_reason) == (row[5], SAID)

    with pytest.raises(grpc.RpcError) as caught:
        shared.call()(message(), timeout=WAIT_S)
    assert caught.value.code() == grpc.StatusCode[row[0]]
    assert caught.value.details() == f"{kind}: {SAID}"
    assert dict(caught.value.trailing_metadata()).get("retry-after") == wait_of(row)

    param = "file" if isinstance(refusal.error, errors.AudioError) else None
    error = {"message": SAID, "type": row[3], "param": param, "code": row[4]}
    for path, expected, body in (
        (INFER, row[1], {"error": f"{kind}: {SAID}"}),
        (TRANSCRIPTIONS, row[2], {"error": error}),
    ):
        status, headers, answer = shared.ask("POST", path, b"{}")
        assert (status, json.loads(answer)) == (expected, body)
        assert headers["retry-after"] == wait_of(row)
        assert headers["www-authenticate"] == ("Bearer" if status == 401 else None)
