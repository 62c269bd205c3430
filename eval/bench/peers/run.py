"""Peers of the native runtime, measured beside it with the same forced lengths.

Each runs in a process of its own, so that its memory is free afterwards and its crash costs only
its own lines. What it writes goes to a file; the end of that is told if it fails.
"""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from eval.bench.peers.ctranslate2 import measure_ctranslate2
from eval.bench.peers.hugging_face import measure_hugging_face
from eval.bench.peers.vllm import measure_vllm
from eval.bench.plan import Progress
from eval.bench.table import Measurement, refused
from serve.engine import Dims
from serve.errors import DeadlineError, EarshotError, UnavailableError

START_S = 900.0  # to convert weights, load and compile
FIGURES = 20  # at most so many are sustained, each with a warm-up that may take as long
STOP_S = 30.0  # for a child that has done its work
LOG_LINES = 20  # of a child that failed

Run = Callable[[Dims, str, float, Progress], Iterator[Measurement]]
"""Takes shape, device, how long to sustain a throughput figure, and what gets a line on each
stage."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """What measures a peer, and what it needs."""

    run: Run
    packages: tuple[str, ...]  # by import name


@dataclasses.dataclass(frozen=True)
class _Said:
    """A line for whoever waits."""

    line: str


@dataclasses.dataclass(frozen=True)
class _Ended:
    """Nothing more will come; with the error that ended it, if one did."""

    error: EarshotError | None = None


_Message = Measurement | _Said | _Ended

PEERS: dict[str, Peer] = {
    "hugging-face": Peer(measure_hugging_face, ("transformers",)),
    "faster-whisper": Peer(measure_ctranslate2, ("ctranslate2", "transformers")),
    "vllm": Peer(measure_vllm, ("vllm", "transformers")),
}


def check_peers(names: Sequence[str]) -> None:
    """Refuse peers that are not installed before anything is measured.

    Raises:
        UnavailableError: a package is missing; the message names it.
    """
    for name in names:
        for package in PEERS[name].packages:
            if importlib.util.find_spec(package) is None:
                raise UnavailableError(
                    f"the peer {name} needs the package {package}, which is not installed; "
                    "install it, or leave the peer out of --peers"
                )


def measure_peer(
    name: str, dims: Dims, device: str, seconds: float, progress: Progress
) -> Iterator[Measurement]:
    """The lines of one peer; where it fails, the last one says why.

    Raises:
        UnavailableError: at once, where a package is missing.
    """
    check_peers([name])
    limit_s = START_S + FIGURES * 2 * seconds
    return _measure(name, PEERS[name].run, dims, device, seconds, progress, limit_s)


def _measure(
    name: str, run: Run, dims: Dims, device: str, seconds: float, progress: Progress, limit_s: float
) -> Iterator[Measurement]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="earshot-peer-") as folder, ours:
        log = Path(folder) / "log"
        process = context.Process(
            target=_child, args=(run, dims, device, seconds, theirs, str(log)), name=name
        )
        process.start()
        theirs.close()
        try:
            yield from _rows(ours, limit_s, log, progress)
            process.join(STOP_S)
        except EarshotError as error:
            for line in _last_lines(log):
                progress(f"{name}: {line}")
            yield refused("throughput", name, "RTFx", error)
        finally:
            _stop(process)


def _rows(pipe: Connection, limit_s: float, log: Path, progress: Progress) -> Iterator[Measurement]:
    """What the child measures.

    Raises:
        DeadlineError: it takes longer than `limit_s` in all.
        UnavailableError: its process died.
        EarshotError: its own error.
    """
    deadline = time.monotonic() + limit_s
    while True:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise DeadlineError(f"not done after {limit_s:.0f} s")
        try:
            message: _Message = pipe.recv()
        except EOFError:
            last = (_last_lines(log) or ["it wrote nothing"])[-1]
            raise UnavailableError(f"its process died: {last.strip()}") from None
        match message:
            case _Said():
                progress(message.line)
            case Measurement():
                yield message
            case _Ended(None):
                return
            case _Ended(error):
                assert error is not None
                raise error


def _last_lines(log: Path) -> list[str]:
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-LOG_LINES:]


def _stop(process: SpawnProcess) -> None:
    """Kill what is left of the child and of everything that it started."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # all gone, or not yet at the head of its group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(STOP_S)


def _child(run: Run, dims: Dims, device: str, seconds: float, pipe: Connection, log: str) -> None:
    """Entry of the child process."""
    os.setsid()  # Ctrl-C is the parent's business, and it can end the whole group
    tempfile.tempdir = str(Path(log).parent)  # so that nothing is left behind by one that is killed
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        for row in run(dims, device, seconds, lambda line: pipe.send(_Said(line))):
            pipe.send(row)
    except EarshotError as error:
        pipe.send(_Ended(error))
    else:
        pipe.send(_Ended())
