"""`python -m serve start`: a server in the foreground."""

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from serve.cli.options import add_config
from serve.contract.config import Config, load_config
from serve.contract.errors import EarshotError
from serve.supervisor.control import order_for
from serve.supervisor.supervisor import Supervisor, running_server

logger = logging.getLogger("earshot")

_WATCH_INTERVAL_S = 0.5


def add_parser(commands: Any) -> None:
    """The command, among those of `python -m serve`."""
    parser = commands.add_parser(
        "start",
        help="run the server in the foreground",
        description="Run Triton Inference Server and the gateway before it until Ctrl-C or "
        "SIGTERM, which let them finish what they have accepted; a second Ctrl-C stops them at "
        "once. What fails is started again. SIGHUP opens the engine that the config names now, as "
        "`python -m serve reload` does; that of a terminal that closes is as SIGTERM. The exit "
        "status is 1 where a request was accepted and not answered.",
    )
    parser.set_defaults(run=_start)
    add_config(parser)
    parser.add_argument(
        "--open", action="store_true", help="let everybody in; as server.open = true in the config"
    )
    parser.add_argument(
        "--log",
        type=Path,
        help="keep the server's log in this file; of several engines in FILE.0, FILE.1",
    )


class _Signals:
    """SIGINT and SIGTERM: the first after `armed` asks for a drain, any other interrupts.

    And SIGHUP, which asks for another engine; but where the terminal was closed that the server was
    started from it is a SIGTERM, or nothing if it was ignored, as with nohup.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.reload = threading.Event()
        self.armed = False
        self._terminal = _has_terminal()
        self._stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.armed or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        if not self._terminal or _has_terminal():
            self.reload.set()
        elif not self._stays:
            self._on_signal(number, frame)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(text, file=sys.stderr)


def _start(args: argparse.Namespace) -> int:
    config = _served(args)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # what the supervisor says
    signals = _Signals()
    engine = args.engine or config.engine
    print(f"starting Triton Inference Server with the engine {engine} …", file=sys.stderr)
    # Those of requests are for whoever looks at this process, where no file is named.
    requests_to = os.dup(2) if args.log is None else None
    with running_server(config, args.engine, args.log, requests_to) as server:
        signals.armed = True
        print(
            f"ready: HTTP {server.http}, gRPC {server.grpc}, "
            f"metrics http://{server.metrics}/metrics",
            flush=True,
        )
        while not signals.asked.wait(_WATCH_INTERVAL_S):
            reason = server.failure()
            if reason is not None:
                raise EarshotError(reason)
            if signals.reload.is_set():
                signals.reload.clear()
                _reload(server, args)
        _say("stopping when all requests are answered; Ctrl-C stops at once")
    _say("stopped")
    return 0


def _reload(server: Supervisor, args: argparse.Namespace) -> None:
    """Open the engine that is named now; the log says what becomes of it."""
    try:
        server.reload(order_for(_served(args), args.engine))
    except EarshotError as error:
        logger.warning("the engine stays as it is: %s", error)


def _served(args: argparse.Namespace) -> Config:
    config = load_config(args.config)
    if args.open:
        return dataclasses.replace(config, server=dataclasses.replace(config.server, open=True))
    return config
