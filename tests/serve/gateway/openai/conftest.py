"""OpenAI's own client of a gateway for all tests of a module."""

import pytest


@pytest.fixture(scope="module")
def client(shared, client_of):
    return client_of(shared)
