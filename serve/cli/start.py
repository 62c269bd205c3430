"""Run Triton Inference Server and the gateway in front of it until Ctrl-C or SIGTERM.

The server then finishes the accepted requests; a second Ctrl-C stops it at once. A process that
fails is restarted. SIGHUP reads the config again and reloads its engine, like `python -m serve
reload`. If the terminal closes, the server stops as on SIGTERM. The exit status is 1 if an accepted
request was not answered.
"""

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
from serve.supervisor.control import ReloadRequest
from serve.supervisor.supervisor import Supervisor, running_server

logger = logging.getLogger("earshot")

_WATCH_INTERVAL_S = 0.5


def add_parser(commands: Any) -> None:
    title = "run the server in the foreground"
    parser = commands.add_parser("start", help=title, description=__doc__)
    parser.set_defaults(run=_start)
    add_config(parser)
    add = parser.add_argument
    add("--open", action="store_true", help="turn authentication off, like server.open = true")
    log = "write the server's log to this file; with several engines to FILE.0, FILE.1"
    add("--log", type=Path, help=log)


class _Signals:
    """The signal handlers of the server.

    The first SIGINT or SIGTERM after `armed` requests a drain; any other one interrupts. SIGHUP
    requests a reload. If the terminal that started the server was closed, SIGHUP acts as SIGTERM,
    or is ignored if it was ignored at the start, as with nohup.
    """

    def __init__(self) -> None:
        self.stop_requested = threading.Event()
        self.reload = threading.Event()
        self.armed = False
        self._terminal = _has_terminal()
        self._stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.armed or self.stop_requested.is_set():
            raise KeyboardInterrupt
        self.stop_requested.set()

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
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # the supervisor's messages
    signals = _Signals()
    engine = args.engine or config.engine
    print(f"starting Triton Inference Server with the engine {engine} …", file=sys.stderr)
    # Without a log file, log lines of requests go to this process's standard error.
    access_log_fd = os.dup(2) if args.log is None else None
    with running_server(config, args.engine, args.log, access_log_fd) as server:
        signals.armed = True
        print(
            f"ready: HTTP {server.http}, gRPC {server.grpc}, "
            f"metrics http://{server.metrics}/metrics",
            flush=True,
        )
        while not signals.stop_requested.wait(_WATCH_INTERVAL_S):
            if (reason := server.failure()) is not None:
                raise EarshotError(reason)
            if signals.reload.is_set():
                signals.reload.clear()
                _reload(server, args)
        _say("stopping after the accepted requests; Ctrl-C stops at once")
    _say("stopped")
    return 0


def _reload(server: Supervisor, args: argparse.Namespace) -> None:
    """Read the config again and load its engine; the log tells the result."""
    try:
        server.reload(ReloadRequest(_served(args), args.engine))
    except EarshotError as error:
        logger.warning("the current engine stays in use: %s", error)


def _served(args: argparse.Namespace) -> Config:
    config = load_config(args.config)
    if args.open:
        return dataclasses.replace(config, server=dataclasses.replace(config.server, open=True))
    return config
