"""Gateways that tests start."""

import pytest

from tests.gateways import Running, until


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
        for triton in running.tritons:
            triton.release()
        until(lambda running=running: running.door.admission.requests == 0)
        assert running.door.admission.bytes == 0
        assert all(triton.cancelled_calls == 0 for triton in running.tritons)
        running.close()


@pytest.fixture
def running(start):
    return start()
