"""A process that runs a runtime, and the connection to it.

The first message is the settings. The process answers once it is ready, or with the reason why it
does not start. The empty JSON object ends it.
"""

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from serve.contract.errors import DeviceError, UnavailableError

logger = logging.getLogger("earshot")

END = b"{}"  # the message that ends the process
_STDERR = 2  # file descriptor
_EXIT_TIMEOUT_S = 5.0  # from the end of the connection to the end of the process
_POLL_S = 0.05  # between reads of messages while the process shuts down
# This process's library path is wrong for another interpreter; the server keeps the original one.
_LIBRARIES, _LIBRARIES_BEFORE = "LD_LIBRARY_PATH", "EARSHOT_LD_LIBRARY_PATH"


def start_python(
    python: str, code: str, descriptors: tuple[int, ...], **environment: str
) -> "subprocess.Popen[bytes]":
    """Start an interpreter with some code and with descriptors that it inherits.

    Raises:
        OSError: the interpreter cannot be started.
    """
    libraries = os.environ.get(_LIBRARIES_BEFORE, os.environ.get(_LIBRARIES, ""))
    return subprocess.Popen(
        [python, "-P", "-c", code],
        env={**os.environ, _LIBRARIES: libraries, **environment},
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,  # stdout is for transcripts
        pass_fds=descriptors,
    )


class RuntimeProcess:
    """The process of a runtime. Not thread-safe.

    Args:
        name: the runtime in messages.
        start: starts the process with its end of the connection.
        settings: the first message.
        start_s: maximum seconds until the process answers.
        stop_s: seconds that the process may take to end.

    Raises:
        UnavailableError: the process does not start.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Connection], "subprocess.Popen[bytes]"],
        settings: bytes,
        start_s: float,
        stop_s: float,
    ) -> None:
        self._name, self._stop_s = name, stop_s
        self._failure = ""
        # A large message may fill the connection's buffer, and `send` must not block.
        self._sender = concurrent.futures.ThreadPoolExecutor(1, "earshot-runtime")
        self._connection, other_end = multiprocessing.Pipe()
        with other_end:
            self._process = start(other_end)
        try:
            self.answer = self._start(settings, start_s)
            """The first message of the process."""
        except BaseException:  # including Ctrl-C
            self.kill()
            raise

    def _start(self, settings: bytes, start_s: float) -> bytes:
        try:
            self._connection.send_bytes(settings)
            if self._connection.poll(start_s):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise UnavailableError(f"before it was ready, {self._exit_message()}") from error
        raise UnavailableError(f"{self._name} did not start within {start_s:g} s; see its log")

    def _exit_message(self) -> str:
        """Return a message on how the process ended, after its connection was lost."""
        status: Any = "unknown"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_EXIT_TIMEOUT_S)
        return f"the {self._name} process ended with status {status}; see its log"

    def check(self) -> None:
        """Check that the runtime has not failed.

        Raises:
            DeviceError: it has failed.
        """
        if self._failure:
            raise DeviceError(f"{self._name} failed: {self._failure}")

    def fail(self, reason: str) -> None:
        """Record why the runtime has failed.

        Raises:
            DeviceError: always.
        """
        self._failure = reason
        self.check()

    def send(self, *messages: bytes) -> None:
        """Send messages in order; return at once."""
        self._sender.submit(self._send, messages)

    def _send(self, messages: tuple[bytes, ...]) -> None:
        with contextlib.suppress(OSError):  # `receive` reports a lost connection
            for message in messages:
                self._connection.send_bytes(message)

    def receive(self, timeout_s: float) -> list[bytes]:
        """Receive every message that has arrived; wait at most `timeout_s` for the first one.

        Raises:
            DeviceError: the runtime or its process has failed.
        """
        self.check()
        messages = list[bytes]()
        try:
            while self._connection.poll(0.0 if messages else timeout_s):
                messages.append(self._connection.recv_bytes())
        except (EOFError, OSError):
            if not messages:  # else the next call reports it
                self.fail(self._exit_message())
        return messages

    @property
    def closed(self) -> bool:
        """Whether `close` or `kill` was called."""
        return self._connection.closed

    def close(self) -> None:
        """End the process; kill it if it does not end in time. Repeated calls do nothing."""
        if self.closed:
            return
        self.send(END)
        deadline_s = time.monotonic() + self._stop_s
        while not self._has_ended():
            if time.monotonic() > deadline_s:
                logger.error(
                    "%s did not shut down within %g s; killing it", self._name, self._stop_s
                )
                break
            with contextlib.suppress(EOFError, OSError):
                while self._connection.poll():  # the process waits if its messages are not read
                    self._connection.recv_bytes()
        self.kill()

    def kill(self) -> None:
        """Kill the process if it runs, and close the connection."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self._process.wait(_EXIT_TIMEOUT_S)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # a message that is being sent fails now
        self._sender.shutdown()
        self._connection.close()

    def _has_ended(self) -> bool:
        """Return whether the process ends within `_POLL_S`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_S)
            return True
        return False
