"""Files to samples, decoded by processes of their own: this side of them.

The first file starts the server, or `start` before it; it ends with this process, and one that has
ended or stands still is started anew for the next file.
"""

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np

from serve.contract.errors import (
    CancelledError,
    DeadlineError,
    EarshotError,
    OverloadedError,
    UnavailableError,
)
from serve.contract.messages import AudioFile, Samples
from serve.speech.containers import Bytes
from serve.speech.downmix import COLUMNS
from serve.speech.meter import Limits, ignore, never
from serve.speech.sandbox.wire import (
    BLOCK_SAMPLES,
    ERRORS,
    HEAD,
    STATUS,
    Kind,
    died,
    no_memory,
    pack_limits,
)

STALL_S = 120.0  # longest wait for a block; a file's processor time has a limit of its own

_LOOK_S = 0.1  # between two looks at whether a file is still wanted
_SEND_S = 5.0  # that the server may take to look at the next file
_END_S = 2.0
_ROOT = Path(__file__).parents[3]
# Beside the paths of this interpreter nothing reaches it: no variables, no keys among them.
_BEGIN = """
import sys
sys.path[:] = {path!r}
from serve.speech.sandbox.server import main
main({descriptor})
"""
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # threads would not be copied with it
    # Blocks of samples lie in pages that the process has had before, not each in new ones.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
}
_LIBRARIES, _LIBRARIES_BEFORE = "LD_LIBRARY_PATH", "EARSHOT_LD_LIBRARY_PATH"
_STDERR = 2


def start() -> None:
    """Start the server unless it runs, so that the first file does not wait for it."""
    _server.start()


def decode(
    audio: Bytes,
    limits: Limits,
    stopped: Callable[[], bool] = never,
    warn: Callable[[str], None] = ignore,
) -> Generator[Samples, None, None]:
    """Decode as `serve.speech.sources.decode` does, for any file that is not empty.

    Raises:
        OverloadedError: all files together take too much memory, and this one most.
        UnavailableError: what decodes it cannot be started or reached, or was ended.
        DeadlineError: what decodes it stands still.
    """
    with contextlib.closing(_File(audio, limits, warn)) as file:
        file.begin(audio)
        while (block := file.next(stopped)) is not None:
            yield block


class _File:
    """A file that is being decoded."""

    def __init__(self, audio: Bytes, limits: Limits, warn: Callable[[str], None]) -> None:
        self._size, self._limits, self._warn = len(audio), limits, warn
        self._refusal: EarshotError | None = None
        self._open = contextlib.ExitStack()  # its end ends the file's process
        self._results: socket.socket
        self._status: int

    def begin(self, audio: Bytes) -> None:
        """Have it decoded.

        Raises:
            UnavailableError: the system refuses a descriptor or a process.
        """
        try:
            with contextlib.ExitStack() as theirs:
                self._results, results = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._open.enter_context(self._results)
                theirs.enter_context(results)
                self._results.settimeout(_LOOK_S)
                self._status, status = os.pipe()
                self._open.callback(os.close, self._status)
                theirs.callback(os.close, status)
                file = theirs.enter_context(_descriptor(audio))
                _server.send(self._limits, [file, results.fileno(), status])
        except OSError as error:
            raise UnavailableError(
                f"cannot hand the audio to the process that decodes it: {error}; try again, or "
                "send 16-bit WAV, which needs none"
            ) from error

    def next(self, stopped: Callable[[], bool]) -> Samples | None:
        """Return the next samples; None: there are no more.

        Raises:
            EarshotError: see `decode`.
        """
        head, block = bytearray(HEAD.size), np.empty(BLOCK_SAMPLES, np.float32)
        while True:
            count = self._receive(head, block, stopped)
            if self._refusal is not None:
                raise self._refusal
            if not count:
                raise died(self._read_status(), self._limits)
            kind, taken = HEAD.unpack(head)
            _memory.note(self, taken)
            if kind in (Kind.SAMPLES, Kind.COLUMNS):
                values = block[: (count - HEAD.size) // block.itemsize]
                return values if kind == Kind.SAMPLES else values.reshape(-1, COLUMNS)
            if kind == Kind.WHOLE:
                return None
            if kind == Kind.NO_MEMORY:
                raise no_memory(self._size)
            text = block.tobytes()[: count - HEAD.size].decode()
            if kind != Kind.WARNING:
                raise ERRORS[kind](text)
            self._warn(text)

    def refuse(self, error: EarshotError) -> None:
        """End it with an error, from any thread."""
        self._refusal = error
        with contextlib.suppress(OSError):
            self._results.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End its process, if it has not ended."""
        _memory.forget(self)
        self._open.close()

    def _receive(self, head: bytearray, block: Samples, stopped: Callable[[], bool]) -> int:
        """Receive a message into two parts; return the bytes of both, 0 where nobody sends."""
        end = time.monotonic() + STALL_S
        while not stopped():
            try:
                return self._results.recvmsg_into([head, block.data])[0]
            except ConnectionError:
                return 0
            except TimeoutError as error:
                if time.monotonic() > end:
                    _server.stop()
                    raise DeadlineError(
                        f"no sample of the audio was decoded for {STALL_S:g} s; try again"
                    ) from error
        raise CancelledError("the request ended while its audio was decoded")

    def _read_status(self) -> int | None:
        """Return its process's exit status; None: nobody tells."""
        look = select.poll()
        look.register(self._status, select.POLLIN)
        if not look.poll(_END_S * 1000):
            return None
        status = os.read(self._status, STATUS.size)
        return STATUS.unpack(status)[0] if status else None


class _Memory:
    """The memory of all files that are being decoded, by what their processes say."""

    most_bytes = 1 << 30

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[_File, int] = {}

    def note(self, file: _File, taken: int) -> None:
        """Note what a file takes now; if all take too much, the largest of them is refused."""
        with self._lock:
            self._taken[file] = taken
            if sum(self._taken.values()) <= self.most_bytes:
                return
            largest = max(self._taken, key=self._taken.__getitem__)
            del self._taken[largest]
        largest.refuse(
            OverloadedError(
                "the audio files that are decoded now take too much memory, and this one most; "
                "try again later, or send 16 kHz mono WAV"
            )
        )

    def forget(self, file: _File) -> None:
        """Forget a file that has ended."""
        with self._lock:
            self._taken.pop(file, None)


class _Server:
    """The process that starts one for each file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start it unless it was.

        Raises:
            UnavailableError: it cannot be started.
        """
        with self._lock:
            self._running()

    def send(self, limits: Limits, descriptors: Sequence[int]) -> None:
        """Have a file decoded: its descriptor, and those to which what comes of it goes.

        Raises:
            UnavailableError: it cannot be started.
        """
        message = pack_limits(limits)
        with self._lock:
            for _ in range(2):  # the first may find one that has ended
                try:
                    socket.send_fds(self._running(), [message], descriptors)
                    return
                except OSError as error:
                    self._end()
                    last = error
        raise UnavailableError(f"the process that decodes audio cannot be reached: {last}")

    def stop(self) -> None:
        """End it; files that it has begun go on."""
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        if self._control is None:
            try:
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError as error:
                raise UnavailableError(f"no socket for decoding audio: {error}") from error
            self._control.settimeout(_SEND_S)
            with theirs:
                self._process = _spawn(theirs.fileno())
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # of which it ends
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
    begin = _BEGIN.format(path=path, descriptor=descriptor)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", begin],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # what it says is no transcript
            pass_fds=[descriptor],
        )
    except OSError as error:
        raise UnavailableError(f"cannot start {sys.executable}: {error}") from error


@contextlib.contextmanager
def _descriptor(audio: Bytes) -> Iterator[int]:
    """Yield a descriptor of a file's bytes, which are copied once where they lie in memory."""
    if isinstance(audio, AudioFile):
        yield audio.fileno()
        return
    with open(os.memfd_create("audio"), "wb") as file:
        file.write(audio[:])
        file.flush()
        yield file.fileno()


_memory = _Memory()
_server = _Server()
atexit.register(_server.stop)
