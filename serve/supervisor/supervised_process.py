"""Supervise a process: restart it after a failure with growing delays, and give up in the end."""

import abc
import logging
import time
from collections.abc import Callable

from serve.contract.errors import EarshotError
from serve.supervisor.processes import Child, log_tail

logger = logging.getLogger("earshot")

_FIRST_DELAY_S = 0.5  # before the first restart; doubled each time
_LONGEST_DELAY_S = 30.0
_SETTLED_S = 60.0  # without a failure for this time, the delays start over
MAX_FAILED_STARTS = 5


class ManagedProcess(abc.ABC):
    """A started process of the server.

    Args:
        child: the process.
    """

    def __init__(self, child: Child) -> None:
        self._child = child

    @abc.abstractmethod
    def ready(self) -> bool:
        """Return whether the process works now."""

    @abc.abstractmethod
    def failure(self) -> str | None:
        """Return why the process has failed; None while it works or starts."""

    def log_tail(self) -> str:
        """Return the end of the log."""
        return log_tail(self._child.log())

    def kill(self) -> None:
        """Kill the process and its descendants, if they have not ended."""
        self._child.kill()


class SupervisedProcess:
    """One of the server's processes through all its restarts. For one thread, except `kill`.

    Args:
        name: the name in metrics and messages.
        title: the name for people.
        launch: starts the process; raises an EarshotError if that fails at once.
        start_timeout_s: the time in which it must be ready.
        needed: whether the server needs it; otherwise it is restarted for ever.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        name: str,
        title: str,
        launch: Callable[[], ManagedProcess],
        start_timeout_s: float,
        needed: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.up = False  # at the last poll
        self.running: ManagedProcess | None = None
        self._title = title
        self._launch = launch
        self._start_timeout_s = start_timeout_s
        self._needed = needed
        self._clock = clock
        self.ever_ready = False
        self._ready = False  # whether the present process has been ready
        self._failed_starts = 0  # in a row
        self._delay_s = _FIRST_DELAY_S
        self._due = 0.0  # time of the next start
        self._started = 0.0
        self._killed = False

    def look(self) -> None:
        """Start the process if that is due, check it, and end it after a failure.

        Raises:
            EarshotError: it failed before it was ever ready, or too many times in a row.
        """
        reason = self._start_if_due() if self.running is None else self._check(self.running)
        if reason is not None:
            self._fail(reason)

    def kill(self) -> None:
        """Kill the process for good; its end does not count as a failure."""
        self._killed = True
        self._end()

    def _end(self) -> None:
        running = self.running
        if running is not None:
            running.kill()

    def _start_if_due(self) -> EarshotError | None:
        now = self._clock()
        if now < self._due:
            return None
        self._started, self._ready = now, False
        try:
            self.running = self._launch()
        except EarshotError as error:
            return error
        return None

    def _check(self, running: ManagedProcess) -> EarshotError | None:
        reason = running.failure()
        if reason is not None:
            verb = "failed" if self._ready else "did not start"
            return EarshotError(f"{self._title} {verb}: {reason}")
        self.up = running.ready()
        age_s = self._clock() - self._started
        if self.up:
            self._ready = self.ever_ready = True
            self._failed_starts = 0
            if age_s > _SETTLED_S:
                self._delay_s = _FIRST_DELAY_S
        elif not self._ready and age_s > self._start_timeout_s:
            return EarshotError(
                f"{self._title} was not ready within {self._start_timeout_s:g} s "
                f"(server.start_timeout_s); its log ends:\n{running.log_tail()}"
            )
        return None

    def _fail(self, reason: EarshotError) -> None:
        self.up = False
        self._end()
        self.running = None
        if self._killed:  # by another thread meanwhile
            return
        if not self._ready:
            self._failed_starts += 1
        if not self.ever_ready:
            raise reason
        if self._failed_starts >= MAX_FAILED_STARTS and self._needed():
            raise EarshotError(f"gave up after {self._failed_starts} failed starts: {reason}")
        self.restarts += 1
        logger.warning("%s; it restarts in %g s", reason, self._delay_s)
        self._due = self._clock() + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
