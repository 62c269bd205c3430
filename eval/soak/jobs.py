"""The scenario of jobs while processes are killed: is a job lost, done twice or not reported?

Clients with different keys post jobs. SIGKILL ends processes of the server at random: the
gateway, Triton, the engine's process, or all of them, and then the server is started again. A
client without an answer sends the same job again with its Idempotency-Key.
"""

import base64
import contextlib
import http.server
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil

from eval.clients import JOBS, form
from eval.config import EvaluationProduct, changed
from eval.load import closed_loop
from eval.server import RunningServer, request
from eval.soak.stage import Stage, crowd

_CLIENTS, _JOBS_A_MINUTE = 4, 40
_APART_S = (7.5, 22.5)  # from a ready server to the next kill
_VICTIMS = ("gateway", "tritonserver", "whisper", "all")
_LAST_S = 600.0  # for the last jobs, without kills
_TIMEOUT_S, _PAUSE_S = 10.0, 0.2


class WebhookReceiver(http.server.ThreadingHTTPServer):
    """Receives webhooks."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _WebhookHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: dict[str, set[bytes]] = {}  # by webhook-id


class _WebhookHandler(http.server.BaseHTTPRequestHandler):
    server: WebhookReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.setdefault(self.headers["webhook-id"], set()).add(body)
        self.send_response(http.HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def jobs(stage: Stage) -> None:
    """Post jobs, kill processes, and count the jobs that are lost, done twice or not reported.

    Raises:
        EarshotError: the server did not start, or did not come back.
    """
    count, stopped = max(_CLIENTS, round(_JOBS_A_MINUTE * stage.minutes)), threading.Event()
    owners: dict[str, str] = {}  # the API key of each accepted job, by its id
    retries = 0
    with (
        tempfile.TemporaryDirectory(prefix="earshot-jobs-") as name,
        WebhookReceiver() as receiver,
        crowd(2) as pool,
    ):
        options = {"webhook_url": receiver.url, "beam_size": "1", "short_encoder": "true"}
        content = form(stage.files[stage.shortest_file], **options)

        def post(number: int) -> None:
            """Post a job until it is accepted."""
            nonlocal retries
            key, headers = server.keys[number % _CLIENTS], {"Idempotency-Key": str(number)}
            # A post without an answer is sent again even after the last kill: its job may exist.
            while not stopped.is_set() or server.process.status() is None:
                with contextlib.suppress(httpx2.TransportError):
                    if job := _send(server, key, "POST", JOBS, headers, **content):
                        owners[json.loads(job)["id"]] = key
                        return
                retries += 1
                time.sleep(_PAUSE_S)

        pool.submit(receiver.serve_forever)
        try:
            config = with_jobs(stage.config, Path(name), receiver.url, count)
            with stage.server(config, keys=_CLIENTS) as server:
                posting = pool.submit(
                    closed_loop, post, range(count), at_once=_CLIENTS, stop=stopped
                )
                try:
                    _kill_processes(stage, server, receiver, count)
                finally:
                    stopped.set()  # accepted jobs still come to their end
                posting.result()
                stage.add("posts sent again, without an answer", retries)
                _judge(stage, server, receiver, owners)
        finally:
            receiver.shutdown()


def _send(
    server: RunningServer,
    key: str,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    **content: Any,
) -> str:
    """Return the text of the answer; "" if it is an error."""
    headers = {**(headers or {}), "authorization": f"Bearer {key}"}
    answer = request(server.http, method, path, _TIMEOUT_S, headers=headers, **content)
    return answer.text if answer.is_success else ""


def _judge(
    stage: Stage, server: RunningServer, receiver: WebhookReceiver, owners: dict[str, str]
) -> None:
    """Wait for the webhooks of all accepted jobs, read the jobs, and add the figures."""
    expected, bodies = {f"msg_{id}" for id in owners}, receiver.bodies
    end_s = time.monotonic() + _LAST_S
    while time.monotonic() < end_s and expected - bodies.keys():
        time.sleep(_PAUSE_S)
    server.wait_until_ready()
    lost, texts = [], set[str]()
    for id, key in owners.items():
        job = _send(server, key, "GET", f"{JOBS}/{id}")
        if not job or json.loads(job)["status"] != "completed":
            lost.append(job or id)
        texts.add(_send(server, key, "GET", f"{JOBS}/{id}/result?response_format=text"))
    stage.at_least("jobs accepted", len(owners), 1)
    stage.none_of("jobs lost", lost)
    stage.none_of("webhooks missing", sorted(expected - bodies.keys()))
    # A post that had no answer may not make a second job when it is sent again.
    stage.none_of("webhooks of doubled jobs", sorted(bodies.keys() - expected))
    contradictions = [id for id, received in bodies.items() if len(received) > 1]
    stage.none_of("webhooks that contradict each other", contradictions)
    stage.none_of("results with another text", sorted(texts)[1:])


def _kill_processes(
    stage: Stage, server: RunningServer, receiver: WebhookReceiver, count: int
) -> None:
    """Kill processes at random until the time is over or the ends of all jobs are reported."""
    rng, kills, end_s = random.Random(stage.seed), 0, time.monotonic() + 60 * stage.minutes
    while True:
        server.wait_until_ready()
        time.sleep(rng.uniform(*_APART_S))
        if time.monotonic() > end_s or len(receiver.bodies) >= count:
            break
        victim = rng.choice(_VICTIMS)
        if victim == "all":
            server.restart()
        else:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                server.processes()[victim].kill()
        kills += 1
        stage.say(f"{victim} killed; {len(receiver.bodies)} of {count} jobs reported")
    stage.add("kills", kills)


def with_jobs(
    config: EvaluationProduct, folder: Path, webhook_url: str, count: int
) -> EvaluationProduct:
    """Return the config of a server that keeps jobs in a folder and sends webhooks to a URL."""
    secret = folder / "secret"
    secret.write_text(f"whsec_{base64.b64encode(os.urandom(32)).decode()}", encoding="ascii")
    return changed(
        config,
        "jobs",
        folder=str(folder / "jobs"),
        workers=4,
        max_queued=max(10, 2 * count),
        allowed_hosts=(webhook_url,),
        allowed_networks=("127.0.0.0/8",),
        webhook_secret_file=str(secret),
    )
