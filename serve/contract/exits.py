"""The end of a command line: what it says of an error, and its exit status."""

import os
import signal
import sys
from collections.abc import Callable

from serve.contract.errors import EarshotError

INTERRUPTED = 128 + signal.SIGINT


def exit_status(run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command; the exit status, whatever ends it.

    Args:
        run: the command, which returns its own status.
        interrupted: what is said when Ctrl-C ends it.
    """
    try:
        status = run()
        sys.stdout.flush()
        return status
    except EarshotError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
        return INTERRUPTED
    # Whoever reads the output has closed it, as `head` does: nothing more may be written.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
