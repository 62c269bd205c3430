"""Serve the sandbox: fork one process per audio file. The entry point is `main(descriptor)`.

The server runs in its own interpreter with one thread and all libraries loaded, and reads no file
itself. A forked process costs milliseconds and a few MB. It decodes one file within resource
limits, then exits, so that damage by a malicious file ends with it. When the server is idle, it
forks one process in advance.

NOTE: Linux only. Other systems do not enforce RLIMIT_AS and have no SOCK_SEQPACKET Unix sockets.
"""

import contextlib
import gc
import io
import json
import math
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import soundfile

from serve.contract.errors import AudioError, CancelledError, OptionError
from serve.contract.messages import AudioFile, Samples
from serve.speech import sources
from serve.speech.audio import BLOCK_VALUES
from serve.speech.channels import regroup
from serve.speech.meter import AudioLimits
from serve.speech.sandbox import client

_QUIET_MS = 10  # idle time before the server forks a spare process; a core is free then
_CPU_GRACE_S = 2  # more than the decoder's own CPU limit, which is checked only at reads


def main(descriptor: int) -> None:
    """Serve until the client closes its end of the socket.

    Args:
        descriptor: this side's end of the control socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _warm_up()
    gc.collect()
    gc.freeze()  # keep the collector from writing to pages that forks share
    _ForkServer(socket.socket(fileno=descriptor)).run()


class _ForkServer:
    """A loop that assigns a process to each file and reports its exit status.

    All events arrive through descriptors in `run`; signal handlers do nothing.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._files: dict[int, int] = {}  # process id by status pipe
        self._child_ended, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poller = select.poll()
        self._poller.register(self._control, select.POLLIN)
        self._poller.register(self._child_ended, select.POLLIN)
        self._spare: _WarmChild | None = None

    def run(self) -> None:
        """Accept files until the client closes the control socket."""
        while True:
            ready = self._poller.poll(None if self._spare else _QUIET_MS)
            if not ready:
                self._spare = self._start()
            for descriptor, _ in ready:
                if descriptor == self._control.fileno():
                    if not self._accept():
                        return
                elif descriptor == self._child_ended:
                    os.read(self._child_ended, 1 << 10)
                    self._reap()
                elif descriptor in self._files:  # the client has closed the status pipe
                    self._poller.unregister(descriptor)
                    os.kill(self._files[descriptor], signal.SIGKILL)

    def _accept(self) -> bool:
        """Accept one file; return False at the end of the socket."""
        message, descriptors, _, _ = socket.recv_fds(self._control, client.LIMITS_BYTES, 3)
        if not message:
            return False
        file, results, status = descriptors
        spare = self._spare or self._start()
        try:
            socket.send_fds(spare.socket, [message], [file, results])
        except OSError:  # the spare process has ended
            spare.socket.close()
            spare = self._start()
            socket.send_fds(spare.socket, [message], [file, results])
        self._files[status] = spare.pid
        self._poller.register(status, 0)
        for descriptor in (file, results):
            os.close(descriptor)
        spare.socket.close()
        self._spare = None
        return True

    def _reap(self) -> None:
        """Send the exit statuses of ended processes to their status pipes."""
        statuses = {pid: status for status, pid in self._files.items()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, wait_status = ended
                if (status := statuses.get(pid)) is None:
                    continue  # a spare process without a file
                with contextlib.suppress(OSError):
                    os.write(status, client.STATUS.pack(os.waitstatus_to_exitcode(wait_status)))
                with contextlib.suppress(KeyError):  # unregistered in `run` after a cancellation
                    self._poller.unregister(status)
                del self._files[status]
                os.close(status)

    def _start(self) -> "_WarmChild":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if pid := os.fork():
                return _WarmChild(pid, ours)
            # A copy that this process kept open would hide that the parent has closed a descriptor.
            parents = (self._control.fileno(), ours.fileno(), self._child_ended, self._wake)
            _work(theirs, (*parents, *self._files))


class _WarmChild(NamedTuple):
    """A process that waits for a file."""

    pid: int
    socket: socket.socket


def _work(server: socket.socket, parents: Sequence[int]) -> NoReturn:
    """Wait for a file, decode it, and exit this process.

    Args:
        server: the socket on which the file arrives.
        parents: inherited descriptors of the server to close.
    """
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in parents:
            os.close(descriptor)
        _warm_up()  # copies the pages that decoding writes to, before a file arrives
        message, descriptors, _, _ = socket.recv_fds(server, client.LIMITS_BYTES, 2)
        if message:
            file, results = descriptors
            limits = AudioLimits(*json.loads(message))
            _decode(AudioFile(file), socket.socket(fileno=results), limits)
        status = 0
    except ConnectionError:
        status = 0  # the client has closed the socket
    except Exception:  # noqa: BLE001 - the process ends here, and its status reports the failure
        traceback.print_exc()
    finally:
        os._exit(status)


def _decode(file: AudioFile, results: socket.socket, limits: AudioLimits) -> None:
    """Decode a file; send samples, warnings and the final status in the messages of `client`."""
    first_kb, hung_up, samples_kind = _peak_kb(), select.poll(), client.MessageType.SAMPLES
    hung_up.register(results, 0)

    def send(kind: client.MessageType, content: bytes | memoryview = b"") -> None:
        used_kb = max(0, _peak_kb() - first_kb)
        results.sendmsg([client.HEAD.pack(kind, used_kb * 1024), content])

    def warn(text: str) -> None:
        send(client.MessageType.WARNING, text.encode())

    def values() -> Iterator[Samples]:
        nonlocal samples_kind
        for block in sources.decode(file, limits, lambda: bool(hung_up.poll(0)), warn):
            if block.ndim > 1:  # (n, COLUMNS); all blocks of a file are alike
                samples_kind = client.MessageType.COLUMNS
            yield block.reshape(-1)

    _limit_this_process(len(file), limits)
    try:
        for block in regroup(values(), client.MESSAGE_VALUES):
            send(samples_kind, block.data)
        send(client.MessageType.WHOLE)
    except (AudioError, OptionError) as error:
        send(client.MessageType.ERROR, f"{type(error).__name__} {error}".encode())
    except MemoryError:
        send(client.MessageType.NO_MEMORY)
    except CancelledError:
        pass


def _limit_this_process(size: int, limits: AudioLimits) -> None:
    """Limit this process: no new files, no file growth, no new processes, memory and CPU time."""
    with open("/proc/self/statm", "rb") as statm:
        used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    rlimits = {
        resource.RLIMIT_AS: used_bytes + client.MEMORY_BYTES + size,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 1,  # no new descriptors; `poll` fails with a limit of 0
    }
    for resource_id, value in rlimits.items():
        resource.setrlimit(resource_id, (value, value))
    if math.isfinite(limits.max_cpu_s):
        # At the soft limit the kernel sends SIGXCPU, which the client reports as a timeout.
        cpu_s = math.ceil(limits.max_cpu_s) + _CPU_GRACE_S
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _warm_up() -> None:
    """Make libraries load their lazy parts now: a limited process cannot open files."""
    for format in ("FLAC", "AU"):  # decoded by libsndfile and by FFmpeg
        file = io.BytesIO()
        soundfile.write(file, np.zeros(BLOCK_VALUES, np.float32), 8_000, format=format)
        list(sources.decode(file.getvalue(), AudioLimits(math.inf)))
