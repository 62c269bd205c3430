"""The scenario of jobs while processes are killed: is a job lost, done twice or not reported?

Clients with keys of their own post jobs. SIGKILL ends processes of the server at random: the
gateway, Triton, the engine's process, or all of them, and then the server is started again. A
client without an answer sends the same job again with its Idempotency-Key. The receiver of webhooks
rejects some at first.
"""

import base64
import contextlib
import dataclasses
import http.client
import http.server
import json
import os
import random
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from eval.clients import JOBS, form
from eval.config import EvaluationProduct
from eval.load import closed_loop
from eval.record import Check
from eval.server import RunningServer, request, running
from eval.soak.stage import Found, SoakSettings, crowd
from serve.contract.server_config import JobsConfig

_CLIENTS, _JOBS_A_MINUTE = 4, 40
_APART_S = (7.5, 22.5)  # from a ready server to the next kill
_VICTIMS = ("gateway", "tritonserver", "whisper", "all")
_BACKLOG = 500  # waiting jobs at which clients wait
_LAST_S = 600.0  # for the last jobs, without kills
_REPORT_S = 20.0
_SAMPLE = 200  # results that are read
_TIMEOUT_S, _PAUSE_S = 10.0, 0.2
_REJECTED_SHARE = 0.1  # of the first tries of webhooks


class Receiver(http.server.ThreadingHTTPServer):
    """Receives webhooks, and rejects some at first."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _WebhookHandler)
        self.taken: Counter[str] = Counter()  # by webhook-id
        self.bodies: dict[str, set[bytes]] = {}
        self.rejected: set[str] = set()
        self._random, self._lock = random.Random(seed), threading.Lock()

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.server_port}"

    def receive(self, id: str, body: bytes) -> int:
        """Note a webhook; return the status of the answer."""
        with self._lock:
            self.bodies.setdefault(id, set()).add(body)
            if id not in self.rejected and self._random.random() < _REJECTED_SHARE:
                self.rejected.add(id)
                return http.HTTPStatus.SERVICE_UNAVAILABLE
            self.taken[id] += 1
        return http.HTTPStatus.NO_CONTENT


class _WebhookHandler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.server.receive(str(self.headers["webhook-id"]), body))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def jobs(settings: SoakSettings) -> Found:
    """Post jobs, kill processes, and count what is lost, done twice or not reported.

    Raises:
        EarshotError: the server did not start, or did not come back.
    """
    count = max(_CLIENTS, round(_JOBS_A_MINUTE * settings.minutes))
    audio = settings.short_clip.path.read_bytes()
    with (
        tempfile.TemporaryDirectory(prefix="earshot-jobs-") as name,
        Receiver(settings.seed) as receiver,
        crowd(1) as pool,
    ):
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        config = with_jobs(settings.config, Path(name), receiver.url, count)
        try:
            with running(config, keys=_CLIENTS) as server:
                attack = _JobsAttack(server, receiver, audio, settings)
                posting = pool.submit(attack.post_all, count)
                attack.kill_processes(count)
                posting.result()
                attack.wait_for_the_last()
                yield from attack.found(Path(name))
        finally:
            receiver.shutdown()


def with_jobs(config: EvaluationProduct, folder: Path, hooks: str, count: int) -> EvaluationProduct:
    """Return the config of a server that keeps jobs in a folder and sends webhooks to `hooks`."""
    secret = folder / "secret"
    secret.write_text(f"whsec_{base64.b64encode(os.urandom(32)).decode()}", encoding="ascii")
    jobs = JobsConfig(
        folder=str(folder / "jobs"),
        workers=4,
        max_queued=max(10, 2 * count),
        allowed_hosts=(hooks,),
        allowed_networks=("127.0.0.0/8",),
        webhook_secret_file=str(secret),
    )
    server = dataclasses.replace(config.server, usage_file=str(folder / "usage.sqlite"))
    return dataclasses.replace(config, server=server, jobs=jobs)


class _JobsAttack:
    """The clients of a server that has jobs, and the kills of its processes."""

    def __init__(
        self, server: RunningServer, receiver: Receiver, audio: bytes, settings: SoakSettings
    ) -> None:
        self._server, self._receiver, self._settings = server, receiver, settings
        self._stop, self._began_s = threading.Event(), time.monotonic()
        self._body, self._headers = form(
            audio, {"webhook_url": receiver.url, "beam_size": "1", "short_encoder": "true"}
        )
        self._keys: dict[str, str] = {}  # by the id of a job
        self._sent_again = self._ended_by_itself = 0
        self._kills: Counter[str] = Counter()

    def post_all(self, count: int) -> None:
        """Post `count` jobs, each until it is accepted."""
        closed_loop(self._post, range(count), at_once=_CLIENTS, stop=self._stop)

    def _post(self, number: int) -> None:
        key = self._server.keys[number % _CLIENTS]
        headers = {"Idempotency-Key": str(number), **self._headers}
        while not self._stop.is_set():
            if len(self._keys) - len(self._receiver.taken) < _BACKLOG:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    status, text = self._send(key, "POST", JOBS, self._body, headers)
                    if status == http.client.ACCEPTED:
                        self._keys[json.loads(text)["id"]] = key
                        return
                self._sent_again += 1
            time.sleep(_PAUSE_S)

    def _send(
        self, key: str, method: str, path: str, body: bytes | None = None, headers: Any = None
    ) -> tuple[int, bytes]:
        sent = dataclasses.replace(self._server.at, key=key).headers | (headers or {})
        at = self._server.http
        status, _, text = request(at, method, path, body, sent, timeout_s=_TIMEOUT_S)
        return status, text

    def kill_processes(self, count: int) -> None:
        """Kill processes at random until the time is over or the ends of all jobs are reported."""
        try:
            self._kill_until_done(count)
        finally:
            self._stop.set()  # accepted jobs still come to their end

    def _kill_until_done(self, count: int) -> None:
        rng = random.Random(self._settings.seed)
        end_s = self._began_s + 60 * self._settings.minutes
        kill_s, report_s = float("inf"), time.monotonic() + _REPORT_S
        while (now := time.monotonic()) < end_s and len(self._receiver.taken) < count:
            self._revive()
            if kill_s == float("inf") and self._server.ready():  # since the last kill
                kill_s = now + rng.uniform(*_APART_S)
            if now > kill_s:
                self._kill(rng.choice(_VICTIMS))
                kill_s = float("inf")
            if now > report_s:
                report_s = now + _REPORT_S
                self._settings.say(
                    f"jobs: {len(self._keys)} of {count} accepted, {len(self._receiver.taken)} "
                    f"reported, {self._kills.total()} kills"
                )
            time.sleep(_PAUSE_S)

    def _kill(self, role: str) -> None:
        """Kill a process; "all" kills the whole server and starts it again."""
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            if role == "all":
                self._server.restart()
            else:
                self._server.processes()[role].kill()
            self._kills[role] += 1

    def _revive(self) -> None:
        if self._server.process.poll() is not None:
            self._ended_by_itself += 1
            self._server.restart()

    def wait_for_the_last(self) -> None:
        """Wait until the ends of all accepted jobs are reported."""
        end_s = time.monotonic() + _LAST_S
        while time.monotonic() < end_s and {f"msg_{id}" for id in self._keys} - set(
            self._receiver.taken
        ):
            self._revive()
            time.sleep(_PAUSE_S)
        self._server.wait_until_ready()

    def found(self, folder: Path) -> Found:
        """Stop the server and yield figures and checks."""
        ids, receiver = list(self._keys), self._receiver
        jobs = {id: json.loads(self._get(id)[1]) for id in ids}
        texts = Counter(self._get(id, "/result?response_format=text") for id in ids[:_SAMPLE])
        self._server.end()  # the last usage is written, or lost
        rows, results = _row(
            folder / "jobs" / "jobs.sqlite", "SELECT count(*), count(result) FROM earshot_jobs"
        )
        (used,) = _row(folder / "usage.sqlite", "SELECT coalesce(sum(requests), 0) FROM usage")
        yield "accepted (202)", len(ids)
        yield "posted again, without an answer", self._sent_again
        yield "kills", self._kills.total()
        for role in _VICTIMS:
            yield f"kills of {role}", self._kills[role]
        yield "ended by itself", self._ended_by_itself
        yield "begun more than once", sum(job.get("tries", 0) > 1 for job in jobs.values())
        yield "requests counted as usage", used
        yield "webhooks sent more than once", sum(n > 1 for n in receiver.taken.values())
        yield "webhooks rejected at first", len(receiver.rejected)
        yield "jobs took, s", time.monotonic() - self._began_s
        yield Check("jobs were accepted", bool(ids), f"{len(ids)}")
        for name, number in {
            "lost": sum(job.get("status") != "completed" for job in jobs.values()),
            "webhooks missing": len({f"msg_{id}" for id in ids} - set(receiver.taken)),
            "jobs reported with two different ends": sum(
                len(bodies) > 1 for bodies in receiver.bodies.values()
            ),
        }.items():
            yield Check(f"{name}: none", not number, f"{number}")
        count = len(ids)
        yield Check("each is one job in the table", rows == count, f"{count} ids, {rows} rows")
        yield Check("each has one result", results == count, f"{results}")
        yield Check("none is counted twice as usage", used <= count, f"{used} of {count}")
        same = len(texts) == 1 and all(status == http.client.OK for status, _ in texts)
        detail = f"{len(texts)} different ones of {texts.total()}"
        yield Check("all results read are the same text", same, detail)

    def _get(self, id: str, what: str = "") -> tuple[int, bytes]:
        return self._send(self._keys[id], "GET", f"{JOBS}/{id}{what}")


def _row(path: Path, statement: str) -> tuple[int, ...]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return tuple(database.execute(statement).fetchone())
