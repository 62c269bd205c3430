"""Decode audio files in sandboxed processes: the client side, and the messages.

The first file, or `start`, starts the sandbox server. It ends with this process. A server that has
ended or does not respond is restarted for the next file.

The client sends a file's limits, as JSON, and three descriptors: the file, a socket for its
samples, and a pipe for the exit status of the file's process. Each message on the socket is a head
and its content. The last message is `MessageType.WHOLE` or an error; if neither arrives, the exit
status tells why.
"""

import atexit
import contextlib
import dataclasses
import enum
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np

from serve.contract.errors import (
    AudioError,
    AudioLimitError,
    CancelledError,
    ChannelError,
    CutShortError,
    DeadlineError,
    EarshotError,
    OptionError,
    OverloadedError,
    UnavailableError,
)
from serve.contract.messages import AudioFile, Samples
from serve.speech.channels import COLUMNS
from serve.speech.containers import Bytes
from serve.speech.meter import AudioLimits, ignore, never, too_slow

LIMITS_BYTES = 1 << 12  # maximum bytes of a file's limits
HEAD = struct.Struct("=IQ")  # a `MessageType`, and the peak bytes of memory used by the file so far
STATUS = struct.Struct("=i")  # -n is signal n
MESSAGE_VALUES = 10_922 * COLUMNS
"""Maximum float32 values of a message: 2 s of mono audio; a socket holds two messages."""

# Address space that decoding a file may add to the file's own size. An hour of MP4 has an index of
# 10 MB, a cover image a few MB; the libraries are loaded before.
MEMORY_BYTES = 128 << 20

STALL_S = 120.0  # timeout of a block; a file's CPU time has its own limit

_CANCEL_CHECK_S = 0.1  # interval of the checks whether a file was cancelled
_SEND_S = 5.0  # timeout for the server to accept a file
_END_S = 2.0
_ROOT = Path(__file__).parents[3]
# The process inherits this interpreter's paths and no environment, which may hold secrets.
_BOOTSTRAP = """
import sys
sys.path[:] = {path!r}
from serve.speech.sandbox.server import main
main({descriptor})
"""
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # threads would not survive a fork
    # Reuse memory pages for blocks of samples instead of mapping new ones for each block.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
}
_LIBRARIES, _LIBRARIES_BEFORE = "LD_LIBRARY_PATH", "EARSHOT_LD_LIBRARY_PATH"
_STDERR = 2


class MessageType(enum.IntEnum):
    """The kind of a message from the sandbox."""

    SAMPLES = 0  # float32 follows
    COLUMNS = 1  # float32 of shape (n, COLUMNS) follows
    WHOLE = 2  # the end
    WARNING = 3  # its text follows
    ERROR = 4  # the name of a class in `ERRORS`, a space and the message follow
    NO_MEMORY = 5


ERRORS: dict[str, type[EarshotError]] = {
    kind.__name__: kind
    for kind in (AudioError, AudioLimitError, ChannelError, CutShortError, OptionError)
}


def _early_end_error(status: int | None, limits: AudioLimits) -> EarshotError:
    """Return the error for a file if its process ended early.

    Args:
        status: the exit status of the process; None if the server has ended, too.
        limits: the file's limits.
    """
    if status == -signal.SIGXCPU:
        return too_slow(limits)
    if status is None:
        return UnavailableError(
            "the server of the decoders' processes has ended; the log has the reason: try again, "
            "or send 16-bit WAV, which needs no such process"
        )
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        return UnavailableError("the audio's decoder process was killed; try again")
    if status < 0:
        return AudioError(
            f"audio crashes its decoder ({signal.Signals(-status).name}); the file is damaged or "
            "malicious"
        )
    return EarshotError(f"the audio's decoder ended with status {status}; see the server's log")


def start() -> None:
    """Start the sandbox server if it is not running, so that the first file does not wait."""
    _server.start()


def decode(
    audio: Bytes,
    limits: AudioLimits,
    stopped: Callable[[], bool] = never,
    warn: Callable[[str], None] = ignore,
) -> Generator[Samples, None, None]:
    """Decode a file that is not empty, as `serve.speech.sources.decode`, in a sandbox.

    Raises:
        OverloadedError: the files in decoding use too much memory, and this one uses the most.
        UnavailableError: the decoder's process cannot be started or reached, or was ended.
        DeadlineError: the decoder's process does not respond.
    """
    with contextlib.ExitStack() as opened:
        file = _DecodeTask(audio, limits, opened)
        opened.callback(_memory.remove, file)
        while (block := file.next(stopped, warn)) is not None:
            yield block


class _DecodeTask:
    """A file in decoding.

    Args:
        audio: the file, which is sent to the sandbox server.
        limits: its limits.
        opened: gets the descriptors of this side; closing them ends the file's process.

    Raises:
        UnavailableError: the operating system refuses a descriptor or a process.
    """

    def __init__(self, audio: Bytes, limits: AudioLimits, opened: contextlib.ExitStack) -> None:
        self._size, self._limits = len(audio), limits
        self._refusal: EarshotError | None = None
        try:
            with contextlib.ExitStack() as child_side:
                self._results, results = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                opened.enter_context(self._results)
                child_side.enter_context(results)
                self._results.settimeout(_CANCEL_CHECK_S)
                self._status, status = os.pipe()
                opened.callback(os.close, self._status)
                child_side.callback(os.close, status)
                file = child_side.enter_context(_descriptor(audio))
                _server.send(limits, [file, results.fileno(), status])
        except OSError as error:
            raise UnavailableError(
                f"cannot pass the audio to the decoder's process: {error}; try again, or send "
                "16-bit WAV, which needs no such process"
            ) from error

    def next(self, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Samples | None:
        """Return the next samples; None at the end.

        Raises:
            EarshotError: see `decode`.
        """
        head, block = bytearray(HEAD.size), np.empty(MESSAGE_VALUES, np.float32)
        while True:
            count = self._receive(head, block, stopped)
            if self._refusal is not None:
                raise self._refusal
            if not count:
                raise _early_end_error(self._read_status(), self._limits)
            kind, memory_bytes = HEAD.unpack(head)
            _memory.record(self, memory_bytes)
            if kind in (MessageType.SAMPLES, MessageType.COLUMNS):
                values = block[: (count - HEAD.size) // block.itemsize]
                return values if kind == MessageType.SAMPLES else values.reshape(-1, COLUMNS)
            if kind == MessageType.WHOLE:
                return None
            if kind == MessageType.NO_MEMORY:
                raise AudioError(
                    f"decoding the audio file of {self._size} bytes needs more than the "
                    f"{(self._size + MEMORY_BYTES) >> 20} MiB allowed; the file is damaged or "
                    "malicious"
                )
            text = block.tobytes()[: count - HEAD.size].decode()
            if kind == MessageType.ERROR:
                name, _, message = text.partition(" ")
                raise ERRORS[name](message)
            warn(text)

    def refuse(self, error: EarshotError) -> None:
        """End the decoding with an error; callable from any thread."""
        self._refusal = error
        with contextlib.suppress(OSError):
            self._results.shutdown(socket.SHUT_RDWR)

    def _receive(self, head: bytearray, block: Samples, stopped: Callable[[], bool]) -> int:
        """Receive a message into two buffers; return its bytes, or 0 if the process has ended."""
        deadline_s = time.monotonic() + STALL_S
        while not stopped():
            try:
                return self._results.recvmsg_into([head, block.data])[0]
            except ConnectionError:
                return 0
            except TimeoutError as error:
                if time.monotonic() > deadline_s:
                    _server.stop()
                    raise DeadlineError(
                        f"the audio's decoder returned no sample for {STALL_S:g} s; try again"
                    ) from error
        raise CancelledError("the request was cancelled while its audio was decoded")

    def _read_status(self) -> int | None:
        """Return the exit status of the file's process; None if the server has ended."""
        poller = select.poll()
        poller.register(self._status, select.POLLIN)
        if not poller.poll(_END_S * 1000):
            return None
        status = os.read(self._status, STATUS.size)
        return STATUS.unpack(status)[0] if status else None


class _MemoryBudget:
    """The memory of all files in decoding, as reported by their processes."""

    max_bytes = 1 << 30

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory_bytes: dict[_DecodeTask, int] = {}

    def record(self, file: _DecodeTask, memory_bytes: int) -> None:
        """Record a file's bytes of memory; if the total is too large, reject the largest file."""
        with self._lock:
            self._memory_bytes[file] = memory_bytes
            if sum(self._memory_bytes.values()) <= self.max_bytes:
                return
            largest = max(self._memory_bytes, key=self._memory_bytes.__getitem__)
            del self._memory_bytes[largest]
        largest.refuse(
            OverloadedError(
                "the audio files in decoding use too much memory, and this one uses the most; try "
                "again later, or send 16 kHz mono WAV"
            )
        )

    def remove(self, file: _DecodeTask) -> None:
        """Remove a file that has ended."""
        with self._lock:
            self._memory_bytes.pop(file, None)


class _ForkServerClient:
    """The sandbox server's process, which forks one process per file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process if it is not running.

        Raises:
            UnavailableError: the process cannot be started.
        """
        with self._lock:
            self._control_socket()

    def send(self, limits: AudioLimits, descriptors: Sequence[int]) -> None:
        """Send a file to the process.

        Args:
            limits: the file's limits.
            descriptors: the file, the socket for its samples, and its status pipe.

        Raises:
            UnavailableError: the process cannot be started or reached.
        """
        message = json.dumps(dataclasses.astuple(limits)).encode()
        with self._lock:
            for _ in range(2):  # the first attempt may find a process that has ended
                try:
                    socket.send_fds(self._control_socket(), [message], descriptors)
                    return
                except OSError as error:
                    self._end()
                    last = error
        raise UnavailableError(f"cannot reach the process that decodes audio: {last}; try again")

    def stop(self) -> None:
        """End the process; files in decoding continue."""
        with self._lock:
            self._end()

    def _control_socket(self) -> socket.socket:
        if self._control is None:
            try:
                self._control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._control.settimeout(_SEND_S)
                with server:
                    self._process = _spawn(server.fileno())
            except OSError as error:
                message = f"cannot start {sys.executable}: {error}; try again"
                raise UnavailableError(message) from error
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # the process ends when its socket is closed
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _spawn(descriptor: int) -> "subprocess.Popen[bytes]":
    path = [str(_ROOT), *map(os.path.abspath, sys.path)]
    environment = dict(_ENVIRONMENT)
    libraries = os.environ.get(_LIBRARIES_BEFORE, os.environ.get(_LIBRARIES))
    if libraries is not None:
        environment[_LIBRARIES] = libraries
    code = _BOOTSTRAP.format(path=path, descriptor=descriptor)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,  # stdout is for transcripts
        pass_fds=[descriptor],
    )


@contextlib.contextmanager
def _descriptor(audio: Bytes) -> Iterator[int]:
    """Yield a descriptor of a file; bytes in memory are copied once to a memfd."""
    if isinstance(audio, AudioFile):
        yield audio.fileno()
        return
    with open(os.memfd_create("audio"), "wb") as file:
        file.write(audio[:])
        file.flush()
        yield file.fileno()


_memory = _MemoryBudget()
_server = _ForkServerClient()
atexit.register(_server.stop)
