"""The scenario of jobs while processes are killed: is a job lost, done twice or not reported?

Clients with different keys post jobs. SIGKILL ends processes of the server at random: the
gateway, Triton, the engine's process, or all of them, and then the server is started again. A
client without an answer sends the same job again with its Idempotency-Key.
"""

import base64
import contextlib
import dataclasses
import functools
import http.server
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil

from eval.clients import JOBS, Answer, Ask, NoTranscriptError, answer_to, form, send
from eval.config import changed
from eval.load import closed_loop
from eval.server import Addresses, RunningServer
from eval.soak.stage import Stage, crowd

_CLIENTS, _JOBS_A_MINUTE = 4, 40
_APART_S = (7.5, 22.5)  # from a ready server to the next kill
_VICTIMS = ("gateway", "tritonserver", "whisper", "all")
_LAST_S = 600.0  # for the last jobs, without kills
_TIMEOUT_S, _PAUSE_S = 10.0, 0.2

Webhooks = dict[str, set[bytes]]
"""The received bodies by webhook-id."""


@contextlib.contextmanager
def _received_webhooks() -> Iterator[tuple[str, Webhooks]]:
    """Receive webhooks during a block; give the URL to send them to, and those received so far."""
    bodies: Webhooks = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.setdefault(self.headers["webhook-id"], set()).add(body)
            self.send_response(http.HTTPStatus.NO_CONTENT)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as receiver:
        threading.Thread(target=receiver.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{receiver.server_port}", bodies
        finally:
            receiver.shutdown()


def jobs(stage: Stage) -> None:
    """Post jobs, kill processes, and count the jobs that are lost, done twice or not reported.

    Raises:
        EarshotError: the server did not start, or did not come back.
    """
    count, stopped = max(_CLIENTS, round(_JOBS_A_MINUTE * stage.minutes)), threading.Event()
    ask = dataclasses.replace(stage.files[stage.shortest_file], patience_s=_TIMEOUT_S)
    owners: dict[str, Addresses] = {}  # with the API key of each accepted job, by its id
    with (
        tempfile.TemporaryDirectory(prefix="earshot-jobs-") as folder,
        _received_webhooks() as (url, webhooks),
        crowd(1) as pool,
    ):
        secret = Path(folder, "secret")
        secret.write_text(f"whsec_{base64.b64encode(os.urandom(32)).decode()}", encoding="ascii")
        config = changed(
            stage.config,
            "jobs",
            folder=f"{folder}/jobs",
            workers=4,
            max_queued=max(10, 2 * count),
            allowed_hosts=(url,),
            allowed_networks=("127.0.0.0/8",),
            webhook_secret_file=str(secret),
        )
        content = form(ask, webhook_url=url, beam_size="1", short_encoder="true")
        with stage.server(config, keys=_CLIENTS) as server:

            def post(number: int) -> None:
                """Post a job until it is accepted."""
                addresses = server.addresses[number % _CLIENTS]
                headers = {"Idempotency-Key": str(number)}
                # It is sent again even after the last kill: a job may exist without an answer.
                while not stopped.is_set() or server.process.status() is None:
                    with contextlib.suppress(httpx2.TransportError, NoTranscriptError):
                        job = send(addresses, ask, "POST", JOBS, headers=headers, **content)
                        owners[json.loads(job)["id"]] = addresses
                        return
                    time.sleep(_PAUSE_S)

            posting = pool.submit(closed_loop, post, range(count), at_once=_CLIENTS, stop=stopped)
            try:
                _kill_processes(stage, server, webhooks, count)
            finally:
                stopped.set()  # accepted jobs still come to their end
            posting.result()
            _judge(stage, server, webhooks, owners, ask)


def _judge(
    stage: Stage, server: RunningServer, webhooks: Webhooks, owners: dict[str, Addresses], ask: Ask
) -> None:
    """Wait for the webhooks of all accepted jobs, read the jobs, and add the figures."""
    expected, end_s = {f"msg_{id}" for id in owners}, time.monotonic() + _LAST_S
    while time.monotonic() < end_s and expected - webhooks.keys():
        time.sleep(_PAUSE_S)
    server.wait_until_ready()
    lost, texts = list[Answer](), set[str]()
    for id, addresses in owners.items():
        job = answer_to(functools.partial(send, addresses, ask, "GET", f"{JOBS}/{id}"))
        if job.kind != "answered" or json.loads(job.text)["status"] != "completed":
            lost.append(job)
        path = f"{JOBS}/{id}/result?response_format=text"
        texts.add(answer_to(functools.partial(send, addresses, ask, "GET", path)).text)
    stage.at_least("jobs accepted", len(owners), 1)
    stage.none_of("jobs lost", lost)
    stage.none_of("webhooks missing", sorted(expected - webhooks.keys()))
    # A post that had no answer may not make a second job when it is sent again.
    stage.none_of("webhooks of doubled jobs", sorted(webhooks.keys() - expected))
    contradictions = [id for id, received in webhooks.items() if len(received) > 1]
    stage.none_of("webhooks that contradict each other", contradictions)
    stage.none_of("results with another text", sorted(texts)[1:])


def _kill_processes(stage: Stage, server: RunningServer, webhooks: Webhooks, count: int) -> None:
    """Kill processes at random until the time is over or the ends of all jobs are reported."""
    rng, kills, end_s = random.Random(stage.seed), 0, time.monotonic() + 60 * stage.minutes
    while True:
        server.wait_until_ready()
        time.sleep(rng.uniform(*_APART_S))
        if time.monotonic() > end_s or len(webhooks) >= count:
            break
        victim = rng.choice(_VICTIMS)
        if victim == "all":
            server.restart()
        else:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                server.processes()[victim].kill()
        kills += 1
        stage.say(f"{victim} killed; {len(webhooks)} of {count} jobs reported")
    stage.add("kills", kills)
