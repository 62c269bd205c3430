"""Run the native runtime in a separate process.

One Python thread launches all work of a GPU. In the engine's process it would wait for the
interpreter lock (GIL) after every launch, because other threads take requests, decode audio and
send answers. A GPU's runtime therefore has a separate process, where only the thread that sends
events also uses the lock.

Both processes share the memory of the samples, and a GPU reads them there. Messages are JSON. In an
`_Order` and an `_EventsMessage`, arrays follow the JSON after a zero byte.
"""

import collections
import concurrent.futures
import dataclasses
import faulthandler
import functools
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from serve.contract import errors
from serve.contract.codec import from_json, to_json
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, open_engine
from serve.contract.errors import DeviceError, EarshotError, UnavailableError
from serve.contract.messages import Alignment
from serve.contract.phrases import Trie
from serve.native.device import current
from serve.native.encoders import LENGTHS
from serve.native.runtime import NativeRuntime, check_job
from serve.runtime.child import END, RuntimeProcess, start_python
from serve.runtime.protocol import (
    Capabilities,
    DecodingOptions,
    Detection,
    FinishReason,
    Gauges,
    Job,
    JobEvent,
    Runtime,
    Scores,
)
from serve.speech.features import HOP_LENGTH, WINDOW_SAMPLES, LogMel

logger = logging.getLogger("earshot")

T = TypeVar("T")
Array = npt.NDArray[Any]

START_TIMEOUT_S = 600.0  # for the runtime to load the engine and to compile its kernels
_STOP_S = 20.0  # for the process to end
_MAX_POLL_S = 0.002  # maximum wait for events; a window that becomes ready meanwhile waits too
_IDLE_S = 10.0  # maximum wait for a message while there is no job
_MAX_TRIES = 64  # lists of phrases that are kept
_SWITCH_INTERVAL_S = 0.0005  # as in the engine's process
_STALLED_S = 60  # the kernel ends the process if one turn of the loop takes longer
# Keep the memory of samples and alignments, whatever the limits that Triton has.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 26)}
_ROOT = Path(__file__).resolve().parents[2]
_BOOTSTRAP = """
import sys
sys.path[:] = {path!r}
from serve.native import process
process.run({connection}, {memory})
"""


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The first message to the process."""

    engine: str
    config: RuntimeConfig
    windows: int  # that fit into the shared memory


@dataclasses.dataclass(frozen=True)
class _StartMessage:
    """The first message from the process. It has one of the two values."""

    capabilities: Capabilities | None = None  # the runtime has started
    refused: tuple[str, str] | None = None  # class and message of the error at the start


@dataclasses.dataclass(frozen=True)
class _JobFields:
    """A job; the arrays of its phrases follow."""

    id: int
    place: int  # index of the window in the shared memory
    samples: int
    frames: int
    prompt: tuple[int, ...]
    options: dict[str, bool | int | float]  # fields of `DecodingOptions` but `phrases`
    prefix: int
    draft: tuple[int, ...]
    align_frames: int
    loop_tokens: int
    urgent: bool
    detection: Detection


@dataclasses.dataclass(frozen=True)
class _Order:
    """A message to the process: a job, or the id of a job to cancel."""

    job: _JobFields | None = None
    cancel: int | None = None  # the id of a job
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of each


@dataclasses.dataclass(frozen=True)
class _EventFields:
    """A `JobEvent`; the arrays of its alignment follow."""

    job_id: int
    tokens: tuple[int, ...]
    finished: FinishReason | None
    scores: Scores | None
    error: tuple[str, str] | None  # class and message
    began_s: float | None
    # Whether there are `matrix` and `begins`, and `prefix`; None: no alignment.
    alignment: tuple[bool, bool, int] | None


@dataclasses.dataclass(frozen=True)
class _EventsMessage:
    """A message from the process."""

    events: tuple[_EventFields, ...] = ()
    gauges: Gauges = dataclasses.field(default_factory=Gauges)
    failed: str = ""  # why the device is lost
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()


def _pack(message: _Order | _EventsMessage, arrays: Iterable[Array] = ()) -> bytes:
    arrays = [np.ascontiguousarray(array) for array in arrays]
    kinds = tuple((array.dtype.str, array.shape) for array in arrays)
    text = to_json(dataclasses.replace(message, arrays=kinds)).encode()
    return b"\0".join((text, b"".join(array.tobytes() for array in arrays)))


def _unpack(kind: type[T], message: bytes) -> tuple[T, Iterator[Array]]:
    text, _, content = message.partition(b"\0")
    value: Any = from_json(kind, text, "a message", error=EarshotError)
    arrays, offset = list[Array](), 0
    for dtype, shape in value.arrays:
        array = np.frombuffer(content, dtype, int(np.prod(shape)), offset).reshape(shape)
        arrays.append(array.copy())
        offset += array.nbytes
    return value, iter(arrays)


def _named(error: EarshotError) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _error(named: tuple[str, str]) -> EarshotError:
    kind: type[EarshotError] = getattr(errors, named[0], EarshotError)
    return kind(named[1])


def open_native(engine: Engine, config: RuntimeConfig) -> Runtime:
    """Open the native runtime, for a GPU in a separate process; see the two classes."""
    return (ProcessRuntime if config.device.startswith("cuda") else NativeRuntime)(engine, config)


class ProcessRuntime:
    """A `NativeRuntime` in another process. It implements `Runtime` and takes samples.

    Args:
        engine: an engine of the native runtime.
        config: device, slots and batch sizes.

    Raises:
        UnavailableError: the process does not start.
        EarshotError: as `NativeRuntime`.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._n_text_ctx = engine.manifest.dims.n_text_ctx
        windows = 2 * config.slots  # as many as a `Dispatcher` submits
        self._free = list(range(windows))
        self._places: dict[int, int] = {}  # of the jobs in the process, by id
        self._waiting: dict[int, Job] = {}  # jobs that do not fit into the memory yet, by id
        self._cancelled: list[JobEvent] = []  # events since the last poll
        self._cancelling: set[int] = set()  # jobs in the process that were cancelled
        self._gauges = Gauges()
        descriptor = os.memfd_create("earshot-samples")
        try:
            size = windows * WINDOW_SAMPLES * np.dtype(np.float32).itemsize
            os.truncate(descriptor, size)
            self._samples = np.frombuffer(mmap.mmap(descriptor, size), np.float32)
            self._samples = self._samples.reshape(windows, WINDOW_SAMPLES)
            settings = _Settings(str(engine.path.resolve()), config, windows)
            self._process = RuntimeProcess(
                "native runtime",
                functools.partial(_start, descriptor),
                to_json(settings).encode(),
                START_TIMEOUT_S,
                _STOP_S,
            )
        finally:
            os.close(descriptor)
        answer = from_json(_StartMessage, self._process.answer, "the answer", error=EarshotError)
        if answer.capabilities is None:
            self._process.kill()
            raise _error(answer.refused or ("", "the native runtime gave no answer"))
        self.capabilities = dataclasses.replace(answer.capabilities, input_kind="samples")

    def submit(self, job: Job) -> None:
        self._process.check()
        check_job(job, self._n_text_ctx, self.capabilities)
        self._waiting[job.id] = job
        self._send_waiting()

    def poll(self, timeout_s: float) -> list[JobEvent]:
        events, self._cancelled = self._cancelled, []
        for text in self._process.receive(min(timeout_s, _MAX_POLL_S) if self._places else 0.0):
            report, arrays = _unpack(_EventsMessage, text)
            if report.failed:
                self._process.fail(report.failed)
            self._gauges = report.gauges
            for message in report.events:
                event = _event(message, arrays)
                if message.finished is not None:
                    self._free.append(self._places.pop(event.job_id))
                if event.job_id not in self._cancelling:
                    events.append(event)
                elif message.finished is not None:  # it may have ended before the order came
                    self._cancelling.remove(event.job_id)
                    events.append(JobEvent(event.job_id, finished="cancelled"))
        self._send_waiting()
        return events

    def cancel(self, job_id: int) -> None:
        if self._waiting.pop(job_id, None) is not None:
            self._cancelled.append(JobEvent(job_id, finished="cancelled"))
        elif job_id in self._places:
            self._cancelling.add(job_id)
            self._process.send(_pack(_Order(cancel=job_id)))

    def _send_waiting(self) -> None:
        """Send the jobs that fit into the shared memory, the oldest first."""
        while self._waiting and self._free:
            job = self._waiting.pop(next(iter(self._waiting)))
            place = self._free[-1]
            self._samples[place, : len(job.features)] = job.features.numpy()
            self._places[job.id] = self._free.pop()
            values = vars(job.options)
            message = _JobFields(
                place=place,
                samples=len(job.features),
                options={name: value for name, value in values.items() if name != "phrases"},
                **{name: getattr(job, name) for name in _COPIED},
            )
            phrases = job.options.phrases
            arrays = () if phrases is None else vars(phrases).values()
            self._process.send(_pack(_Order(message), arrays))

    def gauges(self) -> Gauges:
        self._process.check()
        return self._gauges

    def close(self) -> None:
        self._process.close()
        self._gauges = Gauges()


# Fields of `_JobFields` that `Job` lacks or has in another form.
_OWN = ("place", "samples", "options")
_COPIED = [field.name for field in dataclasses.fields(_JobFields) if field.name not in _OWN]


def _start(memory: int, connection: Connection) -> "subprocess.Popen[bytes]":
    path = [str(_ROOT), *map(os.path.abspath, sys.path)]
    descriptors = connection.fileno(), memory
    code = _BOOTSTRAP.format(path=path, connection=descriptors[0], memory=memory)
    try:
        return start_python(sys.executable, code, descriptors, **_ALLOCATOR)
    except OSError as error:
        raise UnavailableError(f"cannot start {sys.executable}: {error}; try again") from error


def _event(message: _EventFields, arrays: Iterator[Array]) -> JobEvent:
    alignment = None
    if message.alignment is not None:
        has_matrix, has_begins, prefix = message.alignment
        probs = next(arrays)
        matrix = next(arrays) if has_matrix else None
        alignment = Alignment(probs, matrix, next(arrays) if has_begins else None, prefix)
    return JobEvent(
        message.job_id,
        message.tokens,
        message.finished,
        message.scores,
        None if message.error is None else _error(message.error),
        alignment,
        message.began_s,
    )


# ---------------------------------------------------------------- in the process


def run(connection: int, memory: int) -> None:
    """Serve a connection; the entry point of the process.

    Args:
        connection: the descriptor of the connection.
        memory: the descriptor of the shared memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.register(signal.SIGALRM, chain=True)  # prints where it stalled, then ends it
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    serve(Connection(connection), memory)


def _end_with_parent(connection: int) -> None:
    """End this process when the other side of its connection has ended, whatever it does."""
    poller = select.poll()
    poller.register(connection, 0)  # reports only that the other side is gone
    poller.poll()
    os._exit(1)


def serve(connection: Connection, memory: int) -> None:
    """Open the runtime that the first message asks for, and run it until the connection ends."""
    settings = from_json(_Settings, connection.recv_bytes(), "the settings")
    try:
        engine = open_engine(settings.engine)
        runtime = NativeRuntime(engine, settings.config)
        session = _JobLoop(connection, runtime, engine, memory, settings.windows)
    except Exception as error:  # noqa: BLE001 - it is logged
        named = _named(_as_ours(error, "the runtime failed to start"))
        connection.send_bytes(to_json(_StartMessage(refused=named)).encode())
        return
    connection.send_bytes(to_json(_StartMessage(runtime.capabilities)).encode())
    try:
        session.serve()
    except Exception as error:  # noqa: BLE001 - it is logged
        session.fail(str(_as_ours(error, "the runtime failed")))


def _as_ours(error: Exception, description: str) -> EarshotError:
    """Return the error itself, or log an unexpected one and return an internal error."""
    if isinstance(error, EarshotError):
        return error
    logger.error("%s", description, exc_info=error)
    return EarshotError(f"internal error: {errors.shown(error)}")


class _JobLoop:
    """The jobs of a connection in a runtime."""

    def __init__(
        self,
        connection: Connection,
        runtime: NativeRuntime,
        engine: Engine,
        memory: int,
        windows: int,
    ) -> None:
        self._connection, self._runtime = connection, runtime
        self._n_jobs = 0
        self._tries: dict[bytes, Trie] = {}
        device = torch.device(runtime.capabilities.device)
        lengths = [frames * HOP_LENGTH for frames in LENGTHS]
        self._log_mel = LogMel(engine.load_mel_filters(), device, lengths)
        shared = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32)
        self._samples = shared.view(windows, WINDOW_SAMPLES)
        if device.type == "cuda":
            cuda: Any = torch.cuda  # has incomplete type hints
            with current(device):
                status = cuda.cudart().cudaHostRegister(shared.data_ptr(), shared.nbytes, 0)
                cuda.check_error(int(status))
        # A large alignment may fill the connection's buffer, and the GPU must not wait.
        self._sender = concurrent.futures.ThreadPoolExecutor(1, "earshot-events")
        self._sent = collections.deque[concurrent.futures.Future[None]]()

    def serve(self) -> None:
        """Carry out orders and decode until told to end.

        Raises:
            DeviceError: the device failed.
            Exception: a bug, also one while events were sent.
        """
        while True:
            signal.alarm(_STALLED_S)
            while self._sent and self._sent[0].done():
                self._sent.popleft().result()
            events = list[JobEvent]()
            while self._connection.poll(0.0 if self._n_jobs else _IDLE_S):
                message = self._connection.recv_bytes()
                if message == END:
                    return
                events += self._carry_out(message)
            events += self._runtime.poll(0.0)
            if events:
                self._n_jobs -= sum(event.finished is not None for event in events)
                self._sent.append(self._sender.submit(self._send, events, self._runtime.gauges()))

    def fail(self, reason: str) -> None:
        """Report after all events that the runtime is lost."""
        signal.alarm(_STALLED_S)
        self._sender.submit(self._connection.send_bytes, _pack(_EventsMessage(failed=reason)))
        self._sender.shutdown()

    def _carry_out(self, message: bytes) -> list[JobEvent]:
        """Carry out an order; return the event of a job that the runtime rejects."""
        order, arrays = _unpack(_Order, message)
        if order.cancel is not None:
            self._runtime.cancel(order.cancel)
        if order.job is None:
            return []
        self._n_jobs += 1
        try:
            self._runtime.submit(self._job(order.job, arrays))
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001 - it is logged
            ours = _as_ours(error, f"job {order.job.id} failed")
            return [JobEvent(order.job.id, finished="error", error=ours)]
        return []

    def _job(self, message: _JobFields, arrays: Iterator[Array]) -> Job:
        samples = self._samples[message.place, : message.samples]
        try:
            features = self._log_mel(samples, message.frames * HOP_LENGTH)
        except torch.AcceleratorError as error:
            raise DeviceError(f"the device failed: {error}") from error
        contents = tuple(arrays)
        phrases = self._trie(contents) if contents else None
        options = DecodingOptions(**message.options, phrases=phrases)  # type: ignore[arg-type]
        fields = {name: getattr(message, name) for name in _COPIED}
        return Job(features=features, options=options, **fields)

    def _trie(self, arrays: tuple[Array, ...]) -> Trie:
        """Return the trie of these arrays; equal ones are the same object, as a runtime expects."""
        key = b"".join(array.tobytes() for array in arrays)
        trie = self._tries.pop(key, None) or Trie(*arrays)
        self._tries[key] = trie  # the last one used comes last
        if len(self._tries) > _MAX_TRIES:
            del self._tries[next(iter(self._tries))]
        return trie

    def _send(self, events: list[JobEvent], gauges: Gauges) -> None:
        messages, arrays = list[_EventFields](), list[Array]()
        for event in events:
            alignment, kept = event.alignment, None
            if alignment is not None:
                parts = alignment.matrix, alignment.begins
                kept = parts[0] is not None, parts[1] is not None, alignment.prefix
                arrays += [alignment.token_probs, *(part for part in parts if part is not None)]
            error = None if event.error is None else _named(event.error)
            fields = event.job_id, event.tokens, event.finished, event.scores, error
            messages.append(_EventFields(*fields, event.began_s, kept))
        self._connection.send_bytes(_pack(_EventsMessage(tuple(messages), gauges), arrays))
