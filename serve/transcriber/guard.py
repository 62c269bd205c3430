"""Separate errors that end one request from device failures, which end all requests."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from serve.contract.errors import DeviceError, EarshotError, OptionError, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(description: str, work: Callable[[], T]) -> T | EarshotError:
    """Run one request's work; return its result, or the error that the request must end with.

    All work for a single request runs through this function, so that a bug in it affects no other
    request.

    Args:
        description: a description of the work and its request, for the log.
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
        logger.exception("internal error: %s", description)
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
