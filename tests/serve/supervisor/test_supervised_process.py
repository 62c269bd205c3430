"""When a process is started, started again, and given up."""

from types import SimpleNamespace

import pytest

from serve.contract.errors import EarshotError, UnavailableError
from serve.supervisor.processes import MAX_FAILED_STARTS, SupervisedProcess
from serve.supervisor.supervisor import SupervisorMetrics
from serve.wire.folder import SUPERVISOR_PAGE


class FakeProcess:
    def __init__(self):
        self.is_ready, self.reason, self.killed = False, None, 0

    def ready(self):
        return self.is_ready

    def failure(self):
        return self.reason

    def log_tail(self):
        return "the last words"

    def kill(self):
        self.killed += 1


@pytest.fixture
def clock():
    """Stands still until a test sets it."""
    return SimpleNamespace(now=1000.0, needed=True)


@pytest.fixture
def started():
    """All processes that a part has started."""
    return []


@pytest.fixture
def part(clock, started):
    """A part that the server ends with while `clock.needed`."""

    def launch():
        started.append(FakeProcess())
        return started[-1]

    return SupervisedProcess("The server", launch, 20.0, lambda: clock.needed, lambda: clock.now)


def make_ready(part, started):
    part.poll()
    started[-1].is_ready = True
    part.poll()
    assert part.up


def fail(part, started, clock, reason="it broke"):
    """Let the running process fail; returns how long the part then waits."""
    started[-1].reason, count = reason, len(started)
    part.poll()
    assert not part.up and started[-1].killed == 1
    began = clock.now
    while len(started) == count:
        clock.now += 0.25
        part.poll()
    return clock.now - began


def test_it_is_started_at_once_and_up_when_it_says_so(part, started):
    part.poll()
    assert len(started) == 1 and not part.up
    part.poll()
    assert not part.up
    started[0].is_ready = True
    part.poll()
    assert part.up and part.restarts == 0
    started[0].is_ready = False  # it stands still, which passes
    part.poll()
    assert not part.up and part.restarts == 0 and len(started) == 1


def test_a_first_start_that_fails_is_the_end_and_says_why(part, started):
    part.poll()
    started[0].reason = "no engine"
    with pytest.raises(EarshotError, match=r"^The server did not start: no engine$"):
        part.poll()
    assert started[0].killed == 1


def test_a_refusal_to_start_keeps_its_class():
    def launch():
        raise UnavailableError("no room")

    with pytest.raises(UnavailableError, match=r"^no room$"):
        SupervisedProcess("The server", launch, 1.0).poll()


def test_a_start_that_takes_too_long_fails(part, started, clock):
    part.poll()
    clock.now += 19.0
    part.poll()
    clock.now += 2.0
    with pytest.raises(EarshotError, match=r"not ready within 20 s .*\n?.*the last words"):
        part.poll()
    assert started[0].killed == 1


def test_what_died_is_started_again_ever_later(part, started, clock, caplog):
    make_ready(part, started)
    waits = []
    for _ in range(9):
        waits.append(fail(part, started, clock))
        started[-1].is_ready = True
        part.poll()
        assert part.up
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert part.restarts == 9 and len(started) == 10
    assert "The server failed: it broke; it restarts in 0.5 s" in caplog.text


def test_delays_begin_anew_once_it_has_run_well(part, started, clock):
    make_ready(part, started)
    assert [fail(part, started, clock) for _ in range(3)] == [0.5, 1.0, 2.0]
    started[-1].is_ready = True
    clock.now += 61.0
    part.poll()
    assert fail(part, started, clock) == 0.5


def test_it_is_given_up_after_starts_in_a_row_of_which_none_was_ready(part, started, clock):
    make_ready(part, started)
    fail(part, started, clock)
    for _ in range(MAX_FAILED_STARTS - 1):
        fail(part, started, clock, "the engine is damaged")
    started[-1].reason = "the engine is damaged"
    with pytest.raises(
        EarshotError, match=r"gave up after 5 failed starts: The server did not .*damaged"
    ):
        part.poll()
    assert all(process.killed == 1 for process in started)


def test_one_of_several_is_never_given_up_while_others_work(part, started, clock):
    clock.needed = False
    make_ready(part, started)
    for _ in range(2 * MAX_FAILED_STARTS):
        fail(part, started, clock, "the device is gone")
    clock.needed = True
    started[-1].reason = "the device is gone"
    with pytest.raises(EarshotError, match="gave up after 10 failed starts"):
        part.poll()


def test_a_start_that_succeeds_ends_the_row(part, started, clock):
    make_ready(part, started)
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS - 1):
            fail(part, started, clock)
        started[-1].is_ready = True
        part.poll()
    assert part.up


def test_a_process_that_is_killed_while_it_is_looked_at_has_not_failed(part, started, caplog):
    make_ready(part, started)

    def failure():
        part.kill()  # as another thread does, at any time
        return "it ended"

    started[-1].failure = failure
    part.poll()
    assert (part.restarts, caplog.text) == (0, "")
    assert started[-1].killed


def test_a_full_disk_does_not_end_the_server(tmp_path, caplog):
    page = SupervisorMetrics(tmp_path)
    blocked = tmp_path / SUPERVISOR_PAGE
    blocked.mkdir()  # nothing can be written there
    for _ in range(3):
        page.write("earshot_up 0\n")
    assert caplog.text.count(f"cannot write {blocked}") == 1
    blocked.rmdir()
    page.write("earshot_up 0\n")
    assert "earshot_up 0" in (tmp_path / SUPERVISOR_PAGE).read_text()
