"""Gateways that tests start."""

import contextlib

import pytest

from tests.gateways import WAIT_S, Running, until
from tests.jobs import Hearer, jobs_config, keys_of
from tests.serve.gateway.live.sessions import LIVE, LoudIsSpeech, session


@pytest.fixture
def start(tmp_path_factory):
    """Start a gateway; keywords are those of `Running` and of `ServerConfig`.

    Each is empty at its end.
    """
    started = []

    def start(request_timeout_s=600.0, **server):
        running = Running(tmp_path_factory.mktemp("run"), request_timeout_s, **server)
        started.append(running)
        return running

    yield start
    for running in started:
        until(lambda running=running: is_empty(running))
        assert all(triton.cancelled_calls == 0 for triton in running.tritons)
        running.close()


def is_empty(running):
    """Let go of what waits, of a job also that began when another had been let go, and look."""
    for triton in running.tritons:
        triton.release()
    admission = running.services.admission
    return admission.requests == admission.bytes == 0


@pytest.fixture
def running(start):
    return start()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A gateway for tests that leave nothing behind."""
    running = Running(tmp_path_factory.mktemp("shared"), 600.0)
    yield running
    assert running.services.admission.bytes == running.services.admission.requests == 0
    assert running.triton.cancelled_calls == 0
    running.close()


@pytest.fixture(scope="module")
def client_of():
    """Make a client of OpenAI's that accepts nothing but what OpenAI itself would answer."""
    from openai import OpenAI

    with contextlib.ExitStack() as stack:

        def client_of(running, api_key="none", kind=OpenAI, **options):
            options = {"max_retries": 0, "timeout": WAIT_S, **options}
            url, strict = f"http://{running.http}/v1", {"_strict_response_validation": True}
            client = kind(base_url=url, api_key=api_key, **strict, **options)
            return stack.enter_context(client) if kind is OpenAI else client

        yield client_of


@pytest.fixture
def hearer(monkeypatch):
    """A server outside; the gateway's workers look for work more often."""
    monkeypatch.setattr("serve.gateway.jobs.runner.POLL_S", 0.05)
    with contextlib.closing(Hearer()) as hearer:
        yield hearer


@pytest.fixture
def config(tmp_path, hearer):
    """Jobs, which may go to that server, and be told of there."""
    return jobs_config(tmp_path, hearer.place, "files.example.org")


@pytest.fixture
def keys_file(tmp_path):
    return keys_of(tmp_path, bob={"requests_per_minute": 1})


@pytest.fixture
def keyed(start, config, keys_file):
    """Jobs of a gateway with keys."""
    return start(jobs=config, keys_file=keys_file)


@pytest.fixture
def loud_is_speech(monkeypatch):
    monkeypatch.setattr("serve.gateway.live.route.VadModel", LoudIsSpeech)


@pytest.fixture
def talk(start, loud_is_speech):
    """Connect to a gateway, to a new one where none is given."""
    with contextlib.ExitStack() as stack:

        def talk(running=None, prompt="one two three four five six", live=LIVE, **input):
            running = running or start(live=live)
            client = stack.enter_context(session(running, "?intent=transcription"))
            client.set(transcription={"prompt": prompt, "language": "en"}, **input)
            client.until("session.updated")
            return client

        yield talk
