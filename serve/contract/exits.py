"""End a command: print its error and return its exit status."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from serve.contract.errors import ConfigError, EarshotError, shown

INTERRUPTED = 128 + signal.SIGINT

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_status(run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command and return its exit status; print the message of an expected error.

    Args:
        run: the command; it returns its own exit status.
        interrupted: the message after Ctrl-C.
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
    except BrokenPipeError:  # the reader of the output closed it, as `head` does
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        sys.stderr.write(f"error: cannot write the output: {error.strerror}; free some space\n")
        return EarshotError.exit_code


def require_text(arguments: Sequence[str], files: bool = False) -> None:
    """Reject command-line arguments that are not UTF-8: requests and manifests cannot hold them.

    Args:
        arguments: the arguments, with a surrogate for each byte that is not UTF-8.
        files: whether names of existing files need not be UTF-8.

    Raises:
        ConfigError: an argument is not UTF-8.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            if not (files and os.path.lexists(argument)):
                raise ConfigError(f"{shown(argument)} is not UTF-8; expected UTF-8") from None


def _drop_output() -> None:
    """Discard the rest of standard output; otherwise Python's flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first SIGTERM, and ignore later ones.

    If a library installs its own handler inside the block, enter another block after that.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    former_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former_handler)
