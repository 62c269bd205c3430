"""A gateway for all tests of a module, and OpenAI's own client of it."""

import pytest

from tests.gateways import Running


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("run"), 600.0, max_request_mb=4)
    yield running
    assert running.services.admission.bytes == running.services.admission.requests == 0
    assert running.triton.cancelled_calls == 0
    running.close()


@pytest.fixture(scope="module")
def client(shared, client_of):
    return client_of(shared)
