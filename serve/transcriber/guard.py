"""Faults, told apart: one request's, which ends alone, and the runtime's, which end everyone's."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from serve.contract.errors import DeviceError, EarshotError, OptionError, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(what: str, work: Callable[[], T]) -> T | EarshotError:
    """Do one request's work; return its result, or the error that the request must end with.

    All work for a single request goes through here, so that a bug in it harms no other request.

    Args:
        what: is done for which request, for the log.
        work: touches nothing but this request's state and, for `runtime_calls`, the runtime.

    Raises:
        DeviceError: the device failed; no request can go on.
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
    """Turn what calls of the runtime raise into the device's failure.

    Raises:
        OptionError: the runtime refuses one job, and goes on.
        DeviceError: it raised anything else.
    """
    try:
        yield
    except (OptionError, DeviceError):
        raise
    except Exception as error:
        logger.exception("the runtime failed")
        raise DeviceError(f"internal error: {shown(error)}") from error
