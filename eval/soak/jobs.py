"""The scenario of jobs while processes are killed: is a job lost, done twice or not told?

Clients with keys of their own post jobs. Processes of the server die at random by SIGKILL: the
gateway, Triton, the engine's process, or all of them, and then the server is started again. A
client without an answer sends the same job again under its Idempotency-Key. The receiver of
webhooks refuses some at first.
"""

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import http.server
import json
import random
import sqlite3
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from build.clips import Clip
from eval.clients import JOBS, form
from eval.config import Config
from eval.record import Check, Say
from eval.server import Addresses, RunningServer, request, running
from eval.soak.stage import Found
from serve.contract.jobs_config import JobsConfig

_CLIENTS, _JOBS_A_MINUTE = 4, 40
_EVERY_S = 15.0  # from a ready server to the next kill, on the average
_VICTIMS = ("gateway", "tritonserver", "whisper", "all")
_BACKLOG = 500  # jobs that wait, beyond which clients do
_ENDS_S = 600.0  # for the last jobs once nothing is killed any more
_TELL_S = 20.0
_SAMPLE = 200  # results that are read
_TIMEOUT_S, _PAUSE_S = 10.0, 0.2
_REFUSED_SHARE = 0.1  # of first tries of webhooks
SECRET = b"eval jobs signs its webhooks by this"


class Receiver(http.server.ThreadingHTTPServer):
    """Receives webhooks, refuses some at first, and notes each that is signed rightly."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.taken: Counter[str] = Counter()  # by webhook-id
        self.bodies: dict[str, set[bytes]] = {}
        self.refused: Counter[str] = Counter()
        self.forged = 0
        self.random = random.Random(seed)
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def receive(self, headers: Any, body: bytes) -> int:
        """Note a webhook; return the status of the answer."""
        id = str(headers["webhook-id"])
        text = f"{id}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.digest(SECRET, text, hashlib.sha256)).decode()
        with self.lock:
            if headers["webhook-signature"] != f"v1,{expected}":
                self.forged += 1
                return 400
            self.bodies.setdefault(id, set()).add(body)
            if not self.refused[id] and self.random.random() < _REFUSED_SHARE:
                self.refused[id] += 1
                return 503
            self.taken[id] += 1
        return 204


class _Hook(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        """Answer a webhook."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.server.receive(self.headers, body))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Poster(threading.Thread):
    """Posts jobs, each until it is accepted, and notes their ids.

    Args:
        at: the server, and the client's key.
        audio: of every job.
        hook: receives the webhooks.
        count: number of jobs.
        go_on: returns whether the next job may be sent now; None ends the thread.
    """

    def __init__(
        self, at: Addresses, audio: bytes, hook: str, count: int, go_on: Callable[[], bool | None]
    ) -> None:
        super().__init__(daemon=True)
        self.at = at
        self.ids: list[str] = []
        self.sent_again = 0
        self.refused: Counter[int] = Counter()
        little = {"beam_size": "1", "best_of": "1", "short_encoder": "true"}
        self._body, self._headers = form(audio, {"webhook_url": hook, **little})
        self._count, self._go_on = count, go_on

    def run(self) -> None:
        """Post the jobs."""
        for number in range(self._count):
            while (may := self._go_on()) is not None:
                if may and self._sent(number):
                    break
                self.sent_again += may
                time.sleep(_PAUSE_S)

    def _sent(self, number: int) -> bool:
        headers = {"Idempotency-Key": str(number), **self._headers}
        try:
            status, text = asked(self.at, "POST", JOBS, self._body, headers)
        except (OSError, http.client.HTTPException):
            return False
        if status != http.client.ACCEPTED:
            self.refused[status] += 1
            return False
        self.ids.append(json.loads(text)["id"])
        return True

    def all_jobs(self) -> Iterator[dict[str, Any]]:
        """Yield the server's list of this key's jobs, page by page; raises OSError."""
        after = ""
        while True:
            status, text = asked(self.at, "GET", f"{JOBS}?limit=100{after}")
            if status != http.client.OK:
                raise OSError(f"the list is status {status}")
            page = json.loads(text)
            yield from page["data"]
            if not page["has_more"]:
                return
            after = f"&after={page['last_id']}"


def asked(
    at: Addresses, method: str, path: str, body: bytes | None = None, headers: Any = None
) -> tuple[int, bytes]:
    """Send one request; return status and body; raises OSError, HTTPException."""
    sent = at.headers | (headers or {})
    status, _, text = request(at.http, method, path, body, sent, timeout_s=_TIMEOUT_S)
    return status, text


def jobs(config: Config, clips: tuple[Clip, ...], say: Say, *, minutes: float, seed: int) -> Found:
    """Post jobs, kill processes, and count what is lost, done twice or not told.

    Raises:
        EarshotError: the server did not start, or did not come back.
    """
    clip = min((one for one in clips if one.text), key=lambda one: one.duration_s)
    count = max(_CLIENTS, round(_JOBS_A_MINUTE * minutes))
    with tempfile.TemporaryDirectory(prefix="earshot-jobs-") as name, Receiver(seed) as receiver:
        folder = Path(name)
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        try:
            with running(with_jobs(config, folder, receiver.url, count), keys=_CLIENTS) as server:
                soak = _Jobs(server, receiver, clip.path.read_bytes(), count, say)
                soak.attack(random.Random(seed), time.monotonic() + 60 * minutes)
                yield from soak.found(folder)
        finally:
            receiver.shutdown()


def with_jobs(config: Config, folder: Path, hooks: str, count: int) -> Config:
    """Return the config of a server that keeps jobs in a folder and tells their ends to `hooks`."""
    secret = folder / "secret"
    secret.write_text(f"whsec_{base64.b64encode(SECRET).decode()}", encoding="ascii")
    kept = JobsConfig(
        folder=str(folder / "jobs"),
        workers=4,
        max_queued=max(10, 2 * count),
        allowed_hosts=(hooks,),
        allowed_networks=("127.0.0.0/8",),
        webhook_secret_file=str(secret),
    )
    server = dataclasses.replace(config.server, usage_file=str(folder / "usage.sqlite"))
    return dataclasses.replace(config, server=server, jobs=kept)


class _Jobs:
    """One attack on a server that has jobs."""

    def __init__(
        self, server: RunningServer, receiver: Receiver, audio: bytes, count: int, say: Say
    ) -> None:
        self._server, self._receiver, self._count, self._say = server, receiver, count, say
        self._stop, self._began_s = threading.Event(), time.monotonic()
        self._posters: list[Poster] = []
        for i, key in enumerate(server.keys):
            at = dataclasses.replace(server.at, key=key)
            share = count // len(server.keys) + (i < count % len(server.keys))
            self._posters.append(Poster(at, audio, receiver.url, share, self._go_on))

    def _go_on(self) -> bool | None:
        waiting = sum(len(poster.ids) for poster in self._posters) - len(self._receiver.taken)
        return None if self._stop.is_set() else waiting < _BACKLOG

    def attack(self, rng: random.Random, end_s: float) -> None:
        """Post and kill until all jobs are told or the time is over; wait for the last ones."""
        for poster in self._posters:
            poster.start()
        self._strike(rng, end_s)
        self._stop.set()  # accepted jobs still have their end
        self._server.wait_until_ready(revived=True)
        for poster in self._posters:
            poster.join()
        wait_s = time.monotonic() + _ENDS_S
        while time.monotonic() < wait_s and not all(
            f"msg_{id}" in self._receiver.taken for poster in self._posters for id in poster.ids
        ):
            time.sleep(_PAUSE_S)

    def _strike(self, rng: random.Random, end_s: float) -> None:
        next_s, told_s = float("inf"), time.monotonic() + _TELL_S
        while (now := time.monotonic()) < end_s:
            self._server.revive()
            accepted = sum(len(poster.ids) for poster in self._posters)
            heard, kills = len(self._receiver.taken), self._server.kills.total()
            if heard >= self._count:
                return
            if next_s == float("inf") and self._server.ready():  # since the last strike
                next_s = now + _EVERY_S * rng.uniform(0.5, 1.5)
            if now > next_s:
                self._server.strike(rng.choice(_VICTIMS))
                next_s = float("inf")
            if now > told_s:
                told_s = now + _TELL_S
                self._say(f"jobs: {accepted} of {self._count}, {heard} told, {kills} kills")
            time.sleep(_PAUSE_S)

    def found(self, folder: Path) -> Found:
        """Stop the server and yield figures and checks."""
        server, receiver = self._server, self._receiver
        ids = [id for poster in self._posters for id in poster.ids]
        jobs = {job["id"]: job for poster in self._posters for job in poster.all_jobs()}
        done = {id for id, job in jobs.items() if job["status"] == "completed"}
        texts = Counter(
            asked(poster.at, "GET", f"{JOBS}/{id}/result?response_format=text")
            for poster in self._posters
            for id in poster.ids[: _SAMPLE // len(self._posters)]
        )
        server.end()  # with which the last usage is written, or lost
        select = "SELECT count(*), count(result) FROM earshot_jobs"
        rows, recorded = _rows(folder / "jobs" / "jobs.sqlite", select)
        spent, _ = _rows(folder / "usage.sqlite", "SELECT coalesce(sum(requests), 0), 0 FROM usage")
        heard = {id.removeprefix("msg_") for id in receiver.taken}
        never = {
            "lost": len(set(ids) - done),
            "webhooks missing": len(set(ids) - heard),
            "webhooks signed wrongly": receiver.forged,
            "jobs told with two different ends": sum(
                len(all) > 1 for all in receiver.bodies.values()
            ),
        }
        yield "accepted (202)", len(ids)
        yield "posted again, without an answer", sum(one.sent_again for one in self._posters)
        yield "kills", server.kills.total()
        for role in _VICTIMS:
            yield f"kills of {role}", server.kills[role]
        yield "ended by itself", server.ended_by_itself
        yield "begun more than once", sum(job["tries"] > 1 for job in jobs.values())
        yield "requests counted as usage", spent
        yield "failed", sum(job["status"] == "failed" for job in jobs.values())
        yield "webhooks told more than once", sum(n > 1 for n in receiver.taken.values())
        yield "webhooks refused at first", receiver.refused.total()
        yield "jobs took, s", time.monotonic() - self._began_s
        yield Check("jobs were accepted", bool(ids), f"{len(ids)}")
        for name, number in never.items():
            yield Check(f"{name}: none", not number, f"{number}")
        unique = len(set(ids))
        yield Check("each is one job in the table", rows == unique, f"{unique} ids, {rows} rows")
        yield Check("each has one result", recorded == unique, f"{recorded}")
        yield Check("none is counted twice as usage", spent <= unique, f"{spent} of {unique}")
        same = len(texts) == 1 and all(status == http.client.OK for status, _ in texts)
        kinds = f"{len(texts)} kinds of {texts.total()}"
        yield Check("all results read are the same text", same, kinds)


def _rows(path: Path, statement: str) -> tuple[int, int]:
    with contextlib.closing(
        sqlite3.connect(f"file:{urllib.parse.quote(str(path))}", uri=True)
    ) as db:
        first, second = db.execute(statement).fetchone()
        return int(first), int(second)
