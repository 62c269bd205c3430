"""A server that may be killed whole and is started again, and one request to it."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from eval.config import Config
from eval.processes import descendants, kill
from eval.server import by_role
from serve.contract.errors import EarshotError
from serve.supervisor.server import config_to_toml

TIMEOUT_S = 10.0
PAUSE_S = 0.2


class Server:
    """`python -m serve triton`, which may be killed whole and started again.

    Args:
        config: where its jobs are kept, and its ports.
        folder: for its config and its log.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.address = f"{config.server.host}:{config.server.http_port}"
        self.kills: Counter[str] = Counter()
        self.ended_by_itself = 0
        self._toml, self._log = folder / "jobs.toml", folder / "log"
        self._toml.write_text(config_to_toml(config), encoding="utf-8")
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "serve", "triton", "--config", str(self._toml)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready.

        Raises:
            EarshotError: it is not, within that time.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.healthy():
                return
            self.revive()
            time.sleep(PAUSE_S)
        raise EarshotError(f"the server is not ready after {timeout_s:g} s; its log is {self._log}")

    def healthy(self) -> bool:
        """Tell whether it says that it is well."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(self.address, "GET", "/health", "")[0] == 200
        return False

    def revive(self) -> None:
        """Start it anew if it has ended by itself."""
        if self._process.poll() is not None:
            self.ended_by_itself += 1
            self.end()
            self._process = self._start()

    def strike(self, role: str) -> None:
        """Kill its processes of a role, or all of them, after which it is started anew."""
        if role == "all":
            self.kills[role] += 1
            self.end()
            self._process = self._start()
            return
        victims = [one for name, one in by_role(self._process.pid) if name == role]
        for victim in victims[:1]:
            self.kills[role] += 1
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()

    def end(self) -> None:
        """Kill all of it."""
        family = descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill(family)
        self._process.wait()


def ask(
    address: str, method: str, path: str, key: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes]:
    """Send one request; return the answer's status and body; raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, body, {"Authorization": f"Bearer {key}", **named})
        answer = connection.getresponse()
        return answer.status, answer.read()
