"""Peers of the native runtime, measured beside it with the same forced lengths.

Each runs in a process of its own, so that its memory is free afterwards and its crash costs only
its own lines. What it writes is kept apart; the end of that is told if it fails.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from eval.bench.peers.ctranslate2 import measure_ctranslate2
from eval.bench.peers.vllm import measure_vllm
from eval.bench.table import Measurement, refused
from eval.processes import ChildProcess, Send
from eval.random_whisper.shapes import Shape
from eval.record import Say, missing_packages
from serve.contract.errors import EarshotError, UnavailableError

START_S = 900.0  # to convert weights, load and compile
SUSTAINED = 10  # a figure is told after at most so many times as long as it is sustained
LOG_LINES = 20  # told of a child that failed

Run = Callable[[Shape, str, float, Say], Iterator[Measurement]]
"""Takes shape, device, how long to sustain a throughput figure, and what gets a line on each
stage."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """The measurement of a peer, and the packages that it needs."""

    run: Run
    packages: tuple[str, ...]  # by import name


PEERS: dict[str, Peer] = {
    "faster-whisper": Peer(measure_ctranslate2, ("ctranslate2", "transformers")),
    "vllm": Peer(measure_vllm, ("vllm", "transformers")),
}


def check_peers(names: Sequence[str]) -> None:
    """Refuse peers that are not installed before anything is measured.

    Raises:
        UnavailableError: a package is missing; the message names it.
    """
    for name in names:
        for package in missing_packages(PEERS[name].packages):
            raise UnavailableError(
                f"the peer {name} needs the package {package}, which is not installed; "
                "install it, or leave the peer out of --peers"
            )


def measure_peer(
    name: str, shape: Shape, device: str, seconds: float, progress: Say
) -> Iterator[Measurement]:
    """Yield the lines of one peer that is installed; where it fails, the last one says why."""
    arguments = (PEERS[name].run, shape, device, seconds)
    silence_s = START_S + SUSTAINED * seconds
    with ChildProcess(f"the peer {name}", _send_measurements, arguments, log=None) as child:
        try:
            while (message := child.receive(silence_s)) is not None:
                if isinstance(message, Measurement):
                    yield message
                else:
                    progress(message)
        except EarshotError as error:
            for line in child.last_lines(LOG_LINES):
                progress(f"{name}: {line}")
            yield refused("throughput", name, "RTFx", error)


def _send_measurements(send: Send, run: Run, shape: Shape, device: str, seconds: float) -> None:
    """Do a peer process's work: send its figures, and its lines of progress as plain text."""
    for measurement in run(shape, device, seconds, send):
        send(measurement)
