"""Requests by their keys: cancels that come early, late, or just then."""

import pytest

from serve.contract.errors import AudioError, CancelledError
from serve.contract.messages import RequestFailed, RequestFinished, RequestHandle
from serve.triton import cancellation as keys_module
from serve.triton.cancellation import CancellationRegistry
from tests.serving import TRANSCRIPT


class Request:
    """One request: keeps what it hears, whether it was cancelled, and how it may be answered."""

    def __init__(self):
        self.heard = []
        self.cancels = 0
        self.say = None
        self.meanwhile = lambda: None

    def submit(self, on_event):
        self.say = on_event
        self.meanwhile()
        return RequestHandle(self.cancel)

    def cancel(self):
        self.cancels += 1


@pytest.fixture
def keys():
    return CancellationRegistry()


@pytest.fixture
def request_(keys):
    return Request()


def submit(keys, key, request):
    return keys.submit(key, request.heard.append, request.submit)


def assert_free(keys):
    """Nothing is left of the request that had this key, or another could not have it."""
    submit(keys, "0-a-1", Request())


def test_a_key_cancels_its_request_alone_and_only_while_it_runs(keys):
    first, second = Request(), Request()
    submit(keys, "0-a-1", first)
    submit(keys, "0-a-2", second)
    keys.cancel("0-a-1")
    assert (first.cancels, second.cancels) == (1, 0)
    second.say(RequestFinished(TRANSCRIPT))
    assert second.heard == [RequestFinished(TRANSCRIPT)]
    keys.cancel("0-a-2")
    assert second.cancels == 0


def test_what_ends_while_it_is_submitted_is_forgotten(keys, request_):
    request_.meanwhile = lambda: request_.say(RequestFinished(TRANSCRIPT))
    submit(keys, "0-a-1", request_)
    assert_free(keys)


def test_a_new_senders_first_cancel_ends_what_its_process_left_and_nothing_else(keys):
    requests = {key: Request() for key in ("0-a-1", "0-a-2", "0-ab-1", "0-b-2", "1-a-1")}
    for key, request in requests.items():
        submit(keys, key, request)
    keys.cancel("0-b-1")
    assert [request.cancels for request in requests.values()] == [1, 1, 1, 0, 0]


def test_a_refused_request_leaves_nothing_behind(keys):
    def refuse(on_event):
        raise AudioError("no audio")

    with pytest.raises(AudioError):
        keys.submit("0-a-1", print, refuse)
    assert_free(keys)


def test_a_key_that_is_in_use_is_refused(keys, request_):
    submit(keys, "0-a-1", request_)
    with pytest.raises(CancelledError, match="use each key once"):
        submit(keys, "0-a-1", Request())
    keys.cancel("0-a-1")
    assert request_.cancels == 1


def test_failures_end_a_key_too(keys, request_):
    submit(keys, "0-a-1", request_)
    request_.say(RequestFailed(AudioError("x")))
    assert_free(keys)


def test_only_the_latest_cancels_are_remembered(keys, monkeypatch):
    for number in range(keys_module.MAX_CANCELLED_KEYS + 1):
        keys.cancel(f"0-a-{number}")
    submit(keys, "0-a-0", Request())
    with pytest.raises(CancelledError):
        submit(keys, "0-a-1", Request())
