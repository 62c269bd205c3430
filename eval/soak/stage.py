"""The server under attack, started as users start it, and a look at all its processes."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from build.clips import Clip
from eval.config import Config
from eval.processes import descendants, kill
from eval.record import Say
from eval.server import by_role, metrics_page
from eval.soak.client import Addresses, Ending, by_grpc
from serve.contract.errors import EarshotError
from serve.supervisor.run import on_free_ports
from serve.supervisor.server import config_to_toml

SHORT_S = 3.0  # a clip of at most so long is a short one
_READY_GRACE_S = 10.0
_STOP_GRACE_S = 30.0  # beyond the drain's limit
_POLL_S = 0.1
_CONFIG = "soak.toml"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A running server."""

    config: Config
    clips: tuple[Clip, ...]
    folder: Path  # for scratch files; goes with the server
    process: "subprocess.Popen[bytes]"
    log: Path
    say: Say
    key: str  # of the API; "" where the server asks for none

    @property
    def at(self) -> Addresses:
        """Return where it listens."""
        server = self.config.server
        http, grpc = (f"{server.host}:{port}" for port in (server.http_port, server.grpc_port))
        return Addresses(http, grpc, self.key)

    @property
    def toml(self) -> Path:
        """Return its config."""
        return self.folder / _CONFIG

    @property
    def short(self) -> bytes:
        """Read the shortest clip with speech that is a file of its own."""
        spoken = [clip for clip in self.clips if clip.text]
        return min(spoken, key=lambda clip: clip.duration_s).path.read_bytes()

    def processes(self) -> dict[str, psutil.Process]:
        """Find all processes of the server by what they do, those that have ended left out."""
        by_role_name: dict[str, psutil.Process] = {}
        for role, process in by_role(self.process.pid):
            by_role_name[f"{role} {process.pid}" if role in by_role_name else role] = process
        return by_role_name

    def pids(self) -> dict[str, int]:
        """Return the ids of its processes but those of single files."""
        processes = self.processes().items()
        return {role: process.pid for role, process in processes if "sandbox " not in role}

    def metrics(self) -> str:
        """Read the metrics page; "" while nobody answers."""
        server = self.config.server
        with contextlib.suppress(OSError):
            return metrics_page(f"{server.host}:{server.metrics_port}")
        return ""

    def ready(self) -> bool:
        """Return whether the server says over HTTP that it is ready."""
        url = f"http://{self.at.http}/v2/health/ready"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def ask(self, timeout_s: float) -> Ending:
        """Send a short clip over gRPC and wait."""
        return by_grpc(self.at, self.short, timeout_s)

    def answers_again(self, timeout_s: float) -> tuple[float, Ending]:
        """Ask until there is an answer; returns the seconds it took and the last ending."""
        began, last = time.monotonic(), Ending("lost", "the server has ended", 0.0)
        while (left_s := timeout_s - (time.monotonic() - began)) > 0:
            if self.process.poll() is not None:
                break
            last = self.ask(left_s)
            if last.kind == "answered":
                break
            time.sleep(_POLL_S)
        return time.monotonic() - began, last

    def stop(self) -> tuple[int | None, float]:
        """Send SIGTERM to the root; its exit status, None if it had to be killed, and the time."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.config.server.drain_timeout_s + _STOP_GRACE_S)
        return self.process.poll(), time.monotonic() - began


@contextlib.contextmanager
def stage(config: Config, clips: tuple[Clip, ...], say: Say, key: str = "") -> Iterator[Stage]:
    """Start `python -m serve triton` on free ports; every process has ended when this is left.

    Args:
        config: of the server.
        clips: that its clients send.
        say: called with progress.
        key: of the API, where the config names a file of keys.

    Raises:
        EarshotError: it did not become ready; the message ends with what it said.
    """
    config = dataclasses.replace(config, server=on_free_ports(config.server))
    with tempfile.TemporaryDirectory(prefix="earshot-soak-") as name:
        folder = Path(name)
        toml, log = folder / _CONFIG, folder / "log"
        toml.write_text(config_to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "serve", "triton", "--config", str(toml)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the server
            )
        running = Stage(config, clips, folder, process, log, say, key)
        try:
            _wait_until_ready(running)
            yield running
        finally:
            _end(process)


def _wait_until_ready(running: Stage) -> None:
    end = time.monotonic() + running.config.server.start_timeout_s + _READY_GRACE_S
    while not running.ready():
        if running.process.poll() is not None or time.monotonic() > end:
            lines = running.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise EarshotError("the server did not start: " + "\n".join(lines[-5:]))
        time.sleep(_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End whatever still runs: asked first, so that it clears away its files, and then killed."""
    family = descendants(process.pid)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            # Twice: the first asks for a drain, the second is in a hurry.
            process.send_signal(signal.SIGTERM)
            time.sleep(_POLL_S)
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_S)
    kill(family)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
