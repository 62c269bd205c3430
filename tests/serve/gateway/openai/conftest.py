"""A gateway for all tests of a module, and OpenAI's own client of it."""

import openai
import pytest

from tests.gateways import WAIT_S, Running


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("run"), 600.0, max_request_mb=4)
    yield running
    assert running.services.admission.bytes == running.services.admission.requests == 0
    assert running.triton.cancelled_calls == 0
    running.close()


@pytest.fixture(scope="module")
def connect():
    """Make a client that accepts nothing but what OpenAI itself would answer."""
    clients = []

    def connect(running, kind=openai.OpenAI, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S, **options}
        client = kind(
            base_url=f"http://{running.http}/v1", _strict_response_validation=True, **options
        )
        clients.append(client)
        return client

    yield connect
    for client in clients:
        if isinstance(client, openai.OpenAI):
            client.close()


@pytest.fixture(scope="module")
def client(shared, connect):
    return connect(shared)
