"""The process that starts one for each file: `main(descriptor)`, in an interpreter of its own.

It has the libraries loaded, one thread, and never looks into a file itself. So a copy of it (fork)
costs milliseconds and some MB, decodes one file within limits that the system keeps, and takes
with it whatever the file made the libraries do. One copy is made ahead, in quiet moments.

NOTE: Linux alone. Elsewhere RLIMIT_AS is not kept, and Unix sockets know no messages.
"""

import contextlib
import gc
import io
import math
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import soundfile

from serve.contract.errors import AudioError, CancelledError, OptionError
from serve.contract.messages import AudioFile, Samples
from serve.speech import sources
from serve.speech.meter import Limits
from serve.speech.pcm import BLOCK_VALUES
from serve.speech.sandbox.wire import (
    BLOCK_SAMPLES,
    ERRORS,
    HEAD,
    LIMITS,
    MEMORY_BYTES,
    STATUS,
    Kind,
    unpack_limits,
)

_QUIET_MS = 10  # without news, after which the next file's process is made: a core is free then
_CPU_GRACE_S = 2  # beyond its limit, after which a file that asks for no byte is ended


def main(descriptor: int) -> None:
    """Serve until the other side closes its end of the socket.

    Args:
        descriptor: of this side's end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _warm_up()
    gc.collect()
    gc.freeze()  # so that no copy writes to all of it
    _Server(socket.socket(fileno=descriptor)).run()


class _Server:
    """Gives each file a process, and tells how that ended.

    What happens is read from descriptors, in one place: no handler of a signal does anything.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._files: dict[int, int] = {}  # processes' ids, by the pipes that get their statuses
        self._ended, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._looks = select.poll()
        self._looks.register(self._control, select.POLLIN)
        self._looks.register(self._ended, select.POLLIN)
        self._spare: _Spare | None = None

    def run(self) -> None:
        """Take files until nobody can send one any more."""
        while True:
            looked = self._looks.poll(None if self._spare else _QUIET_MS)
            if not looked:
                self._spare = self._start()
            for descriptor, _ in looked:
                if descriptor == self._control.fileno():
                    if not self._take():
                        return
                elif descriptor == self._ended:
                    os.read(self._ended, 1 << 10)
                    self._reap()
                elif descriptor in self._files:  # nobody will read the status any more
                    self._looks.unregister(descriptor)
                    os.kill(self._files[descriptor], signal.SIGKILL)

    def _take(self) -> bool:
        """Take one file; return False where none came."""
        message, descriptors, _, _ = socket.recv_fds(self._control, LIMITS.size, 3)
        if not message:
            return False
        file, results, status = descriptors
        spare = self._spare or self._start()
        try:
            socket.send_fds(spare.socket, [message], [file, results])
        except OSError:  # it has ended
            spare.socket.close()
            spare = self._start()
            socket.send_fds(spare.socket, [message], [file, results])
        self._files[status] = spare.pid
        self._looks.register(status, 0)
        for descriptor in (file, results):
            os.close(descriptor)
        spare.socket.close()
        self._spare = None
        return True

    def _reap(self) -> None:
        """Tell whoever waits for a process that has ended how it did."""
        statuses = {pid: status for status, pid in self._files.items()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, how = ended
                if (status := statuses.get(pid)) is None:
                    continue  # it had no file yet
                with contextlib.suppress(OSError):
                    os.write(status, STATUS.pack(os.waitstatus_to_exitcode(how)))
                with contextlib.suppress(KeyError):  # it was killed for nobody waited
                    self._looks.unregister(status)
                del self._files[status]
                os.close(status)

    def _start(self) -> "_Spare":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if pid := os.fork():
                return _Spare(pid, ours)
            # Whoever waits for the other end of one of these must not wait for this process.
            parents = (self._control.fileno(), ours.fileno(), self._ended, self._wake)
            _work(theirs, (*parents, *self._files))


class _Spare(NamedTuple):
    """A process that waits for a file."""

    pid: int
    socket: socket.socket


def _work(server: socket.socket, parents: Sequence[int]) -> NoReturn:
    """Wait for a file, decode it, and end this process: it does nothing else.

    Args:
        server: from which the file comes.
        parents: descriptors of the server's that are none of its own.
    """
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in parents:
            os.close(descriptor)
        _warm_up()  # so that pages which decoding writes to are copied before a file waits for it
        message, descriptors, _, _ = socket.recv_fds(server, LIMITS.size, 2)
        if message:
            file, results = descriptors
            _decode(AudioFile(file), socket.socket(fileno=results), unpack_limits(message))
        status = 0
    except ConnectionError:
        status = 0  # nobody wants it any more
    except Exception:  # noqa: BLE001 - it ends here, and whoever waits is told
        traceback.print_exc()
    finally:
        os._exit(status)


class _Results:
    """Sends a file's samples on, in messages as large as may be."""

    def __init__(self, results: socket.socket) -> None:
        self._socket = results
        self._block = np.empty(BLOCK_SAMPLES, np.float32)
        self._count = 0  # of its samples that are not sent
        self._kind = Kind.SAMPLES
        self._first_kb = _peak_kb()
        self._hung_up = select.poll()
        self._hung_up.register(results, 0)

    def gone(self) -> bool:
        """Tell whether nobody takes them any more."""
        return bool(self._hung_up.poll(0))

    def put(self, samples: Samples) -> None:
        """Send some, sooner or later; float32 (n,) or (n, COLUMNS), the same in all calls."""
        most = BLOCK_SAMPLES
        if samples.ndim > 1:
            self._kind, most = Kind.COLUMNS, most - most % samples.shape[1]
        samples = samples.reshape(-1)
        while len(samples):
            part = samples[: most - self._count]
            self._block[self._count : self._count + len(part)] = part
            self._count += len(part)
            samples = samples[len(part) :]
            if self._count == most:
                self._flush()

    def warn(self, text: str) -> None:
        """Send what whoever sent the file should know of it."""
        self._send(Kind.WARNING, text.encode())

    def end(self, kind: Kind, text: str = "") -> None:
        """Send what is left, and how it ended."""
        self._flush()
        self._send(kind, text.encode())

    def _flush(self) -> None:
        if self._count:
            self._send(self._kind, self._block[: self._count].data)
            self._count = 0

    def _send(self, kind: Kind, data: bytes | memoryview) -> None:
        taken_kb = max(0, _peak_kb() - self._first_kb)
        self._socket.sendmsg([HEAD.pack(kind, taken_kb * 1024), data])


def _decode(file: AudioFile, to: socket.socket, limits: Limits) -> None:
    results = _Results(to)
    _limit_this_process(len(file), limits)
    try:
        for samples in sources.decode(file, limits, results.gone, results.warn):
            results.put(samples)
        results.end(Kind.WHOLE)
    except (AudioError, OptionError) as error:
        results.end(next(kind for kind, of in ERRORS.items() if isinstance(error, of)), str(error))
    except MemoryError:
        results.end(Kind.NO_MEMORY)
    except CancelledError:
        pass


def _limit_this_process(size: int, limits: Limits) -> None:
    """Allow no more files, none that grow and no more processes; bound memory and time."""
    with open("/proc/self/statm", "rb") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    most = {
        resource.RLIMIT_AS: taken + MEMORY_BYTES + size,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 1,  # no new ones, and `poll` may look at one of the old
    }
    for what, value in most.items():
        resource.setrlimit(what, (value, value))
    if math.isfinite(limits.max_cpu_s):
        # The soft one is told apart from whatever else may end it.
        most_s = math.ceil(limits.max_cpu_s) + _CPU_GRACE_S
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _warm_up() -> None:
    """Have libraries load what they load late: a file's process can open nothing."""
    for format in ("FLAC", "AU"):  # of libsndfile, and of FFmpeg
        file = io.BytesIO()
        soundfile.write(file, np.zeros(BLOCK_VALUES, np.float32), 8_000, format=format)
        list(sources.decode(file.getvalue(), Limits(math.inf)))
