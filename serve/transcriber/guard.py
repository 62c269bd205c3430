"""Separate errors that end one request from device failures, which end all requests."""

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from serve.contract.errors import DeviceError, EarshotError, OptionError, shown

if TYPE_CHECKING:
    from serve.transcriber.active import ActiveRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(what: str, work: Callable[[], T]) -> T | EarshotError:
    """Run one request's work; return its result, or the error that the request must end with.

    All work for a single request runs through this function, so that a bug in it affects no other
    request.

    Args:
        what: a description of the work and its request, for the log.
        work: the work; it may change only this request's state, and the runtime in
            `runtime_calls`.

    Raises:
        DeviceError: the device failed; all requests must end.
    """
    try:
        return work()
    except DeviceError:
        raise
    except EarshotError as error:
        return error
    except Exception as error:
        logger.exception("internal error: %s", what)
        return EarshotError(f"internal error: {shown(error)}")


@contextlib.contextmanager
def runtime_calls() -> Iterator[None]:
    """Convert unexpected exceptions of runtime calls to `DeviceError`.

    Raises:
        OptionError: the runtime rejects one job and continues.
        DeviceError: the runtime raised any other exception.
    """
    try:
        yield
    except (OptionError, DeviceError):
        raise
    except Exception as error:
        logger.exception("the runtime failed")
        raise DeviceError(f"internal error: {shown(error)}") from error


class GuardedPool:
    """A thread pool that does a phase of requests' work, so that the device does not wait for it.

    Args:
        phase: the phase's name in traces.
        threads: the number of threads.
        on_error: called on a thread with the error of a request; must not block.
    """

    def __init__(
        self, phase: str, threads: int, on_error: Callable[["ActiveRequest", EarshotError], None]
    ) -> None:
        self._phase, self._on_error = phase, on_error
        self._threads = concurrent.futures.ThreadPoolExecutor(
            threads, thread_name_prefix=f"earshot-{phase}"
        )

    def add(
        self,
        active: "ActiveRequest",
        what: str,
        work: Callable[[], T],
        on_result: Callable[[T], None],
    ) -> None:
        """Queue the work of a request; returns at once.

        Args:
            active: the request; nothing is done if it has ended.
            what: a description of the work, for the log.
            work: see `guarded`.
            on_result: called on a thread with the work's result; must not block.
        """

        def run() -> None:
            if active.ended:
                return
            began_s = time.monotonic()
            result = guarded(what, work)
            active.phases.note(self._phase, began_s)
            if isinstance(result, EarshotError):
                self._on_error(active, result)
            else:
                on_result(result)

        self._threads.submit(run)

    def close(self) -> None:
        """Start no more work; work in progress may still call back."""
        self._threads.shutdown(wait=False, cancel_futures=True)
