"""Separate errors that end one request from device failures, which end all requests."""

import logging
from collections.abc import Callable
from typing import TypeVar

from serve.contract.errors import DeviceError, EarshotError, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(description: str, work: Callable[[], T]) -> T | EarshotError:
    """Run one request's work; return its result, or the error that the request must end with.

    All work for a single request runs through this function, so that a bug in it affects no other
    request.

    Args:
        description: a description of the work and its request, for the log.
        work: the work; it may change only this request's state.

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
