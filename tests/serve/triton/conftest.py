"""A limit on every test here: sockets, threads and servers are what tests hang on."""

import signal

import pytest

LIMIT_S = 120
SERVER_LIMIT_S = 300


@pytest.fixture(autouse=True)
def limit(request):
    """Interrupts the test, whatever it waits for; fixtures of longer scopes have their own."""
    seconds = SERVER_LIMIT_S if request.node.get_closest_marker("server") else LIMIT_S

    def interrupt(number, frame):
        raise TimeoutError(f"the test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
