"""`python -m eval jobs`: post jobs while processes are killed, and count what became of each.

Several clients with keys of their own post jobs to a real server. Meanwhile its processes die at
random, by SIGKILL: the gateway, Triton, the engine's process, or all of them together, as where the
machine goes down, and then the server is started anew. A client that gets no answer sends the same
job again under its Idempotency-Key; the receiver of webhooks refuses some at first.
"""

import base64
import contextlib
import dataclasses
import random
import sqlite3
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path

from build.clips import load_clips
from eval.config import Config
from eval.jobs.clients import SECRET, Client, Receiver, form
from eval.jobs.server import PAUSE_S, Server, ask
from eval.record import Check, Result, Run, Section, Table
from serve.contract.jobs_config import JobsConfig
from serve.contract.keys import add_key, hash_of
from serve.supervisor.run import on_free_ports

_VICTIMS = ("gateway", "tritonserver", "whisper", "all")
_BACKLOG = 500  # jobs that wait, beyond which clients do
_ENDS_S = 600.0  # that the last jobs may take once nobody is killed any more
_TELL_S = 20.0
_SAMPLE = 200  # results that are read
_DATABASE, _USAGE, _FOLDER = "jobs.sqlite", "usage.sqlite", "jobs"


def jobs(run: Run, *, count: int, clients: int, every: float, minutes: int, seed: int) -> Result:
    """Post jobs, kill processes, and count what is lost, done twice or not told.

    Args:
        run: of the product.
        count: jobs in all.
        clients: each has a key of its own.
        every: seconds between a server's being well and the next kill, on the average.
        minutes: after which no more are posted and nobody is killed.
        seed: of who is killed when.

    Raises:
        EarshotError: the server did not start, or did not come back.
    """
    clip = min(
        (one for one in load_clips(run.config.eval.manifest) if one.text),
        key=lambda one: one.duration_s,
    )
    with tempfile.TemporaryDirectory(prefix="earshot-jobs-") as name:
        folder, receiver = Path(name), Receiver(seed)
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        keys = [f"secret-{number}" for number in range(clients)]
        server = Server(_config(run.config, folder, keys, receiver.url, count), folder)
        try:
            server.wait(run.config.server.start_timeout_s)
            return _attacked(
                run,
                server,
                receiver,
                folder,
                [(key, form(clip.path.read_bytes(), receiver.url)) for key in keys],
                _Plan(count, every, time.monotonic() + 60 * minutes, random.Random(seed)),
            )
        finally:
            server.end()
            receiver.shutdown()
            receiver.server_close()


@dataclasses.dataclass
class _Plan:
    count: int
    every_s: float
    end_s: float  # by the monotonic clock
    random: random.Random


def _config(config: Config, folder: Path, keys: list[str], hooks: str, count: int) -> Config:
    for key in keys:
        add_key(folder / "keys.toml", key, {"sha256": hash_of(key)})
    secret = folder / "secret"
    secret.write_text(f"whsec_{base64.b64encode(SECRET).decode()}", encoding="ascii")
    kept = JobsConfig(
        folder=str(folder / _FOLDER),
        workers=4,
        tries=50,  # it is not their fault
        max_queued=max(10, 2 * count),
        allowed_hosts=(hooks,),
        allowed_networks=("127.0.0.0/8",),
        webhook_secret_file=str(secret),
    )
    server = on_free_ports(config.server)
    server = dataclasses.replace(
        server, keys_file=str(folder / "keys.toml"), usage_file=str(folder / _USAGE)
    )
    return dataclasses.replace(config, server=server, jobs=kept)


def _attacked(
    run: Run,
    server: Server,
    receiver: Receiver,
    folder: Path,
    forms: list[tuple[str, bytes]],
    plan: _Plan,
) -> Result:
    began, stop = time.monotonic(), threading.Event()
    posting: list[Client] = []

    def go_on() -> bool | None:
        waiting = sum(len(client.ids) for client in posting) - len(receiver.taken)
        return None if stop.is_set() else waiting < _BACKLOG

    shares = [plan.count // len(forms) + (i < plan.count % len(forms)) for i in range(len(forms))]
    posting += [
        Client(server.address, key, body, share, go_on)
        for (key, body), share in zip(forms, shares, strict=True)
    ]
    for client in posting:
        client.start()
    _strike(run, server, receiver, posting, plan)
    stop.set()  # what is accepted by now has its end, too
    server.wait(run.config.server.start_timeout_s)
    _wait_for_ends(receiver, posting)
    took_s = time.monotonic() - began
    return _judged(run, server, receiver, folder, posting, took_s)


def _strike(
    run: Run, server: Server, receiver: Receiver, posting: list[Client], plan: _Plan
) -> None:
    """Kill what is healthy, now and then, until all jobs are told or the time is over."""
    next_s, told_s = float("inf"), time.monotonic() + _TELL_S
    while (now := time.monotonic()) < plan.end_s:
        server.revive()
        accepted, heard = sum(len(client.ids) for client in posting), len(receiver.taken)
        if heard >= plan.count:
            return
        if next_s == float("inf") and server.healthy():  # since the last strike
            next_s = now + plan.every_s * plan.random.uniform(0.5, 1.5)
        if now > next_s:
            server.strike(plan.random.choice(_VICTIMS))
            next_s = float("inf")
        if now > told_s:
            told_s = now + _TELL_S
            kills = server.kills.total()
            run.say(f"{accepted} of {plan.count} accepted, {heard} told, {kills} kills")
        time.sleep(PAUSE_S)


def _wait_for_ends(receiver: Receiver, posting: list[Client]) -> None:
    """Wait, but not for ever, until all that was accepted is told."""
    for client in posting:
        client.join()
    end = time.monotonic() + _ENDS_S
    while time.monotonic() < end:
        if all(f"msg_{id}" in receiver.taken for client in posting for id in client.ids):
            return
        time.sleep(PAUSE_S)


def _judged(
    run: Run,
    server: Server,
    receiver: Receiver,
    folder: Path,
    posting: list[Client],
    took_s: float,
) -> Result:
    ids = [id for client in posting for id in client.ids]
    found = {job["id"]: job for client in posting for job in client.all_jobs()}
    done = {id for id, job in found.items() if job["status"] == "completed"}
    texts = Counter(
        ask(server.address, "GET", f"/v1/audio/jobs/{id}/result?response_format=text", client.key)
        for client in posting
        for id in client.ids[: _SAMPLE // len(posting)]
    )
    server.end()  # with which the last usage is written, or lost
    recorded = _rows(
        folder / _FOLDER / _DATABASE, "SELECT count(*), count(result) FROM earshot_jobs"
    )
    usage = _rows(folder / _USAGE, "SELECT coalesce(sum(requests), 0), 0 FROM usage")
    heard = {id.removeprefix("msg_") for id in receiver.taken}
    figures = {
        "accepted (202)": len(ids),
        "posted again, for want of an answer": sum(client.sent_again for client in posting),
        "kills": server.kills.total(),
        **{f"kills of {role}": server.kills[role] for role in _VICTIMS},
        "ended by itself": server.ended_by_itself,
        "jobs in the table": recorded[0],
        "results recorded": recorded[1],
        "begun more than once": sum(job["tries"] > 1 for job in found.values()),
        "requests counted as usage": usage[0],
        "lost": len(set(ids) - done),
        "failed": sum(job["status"] == "failed" for job in found.values()),
        "webhooks missing": len(set(ids) - heard),
        "webhooks told more than once": sum(count > 1 for count in receiver.taken.values()),
        "jobs told with two different ends": sum(len(all) > 1 for all in receiver.bodies.values()),
        "webhooks refused at first": receiver.refused.total(),
        "webhooks signed wrongly": receiver.forged,
        "seconds": round(took_s),
    }
    checks = _checks(figures, len(set(ids)), texts)
    rows = [(name, f"{value:,}") for name, value in figures.items()]
    return Result(figures, checks, (Section("Jobs", [Table(("", ""), rows)]),))


def _checks(
    figures: dict[str, int], ids: int, texts: Counter[tuple[int, bytes]]
) -> tuple[Check, ...]:
    def none(what: str) -> Check:
        return Check(f"{what}: none", not figures[what], f"{figures[what]}")

    rows, recorded = figures["jobs in the table"], figures["results recorded"]
    spent = figures["requests counted as usage"]
    return (
        Check("jobs were accepted", ids > 0, f"{ids}"),
        none("lost"),
        none("webhooks missing"),
        none("webhooks signed wrongly"),
        none("jobs told with two different ends"),
        Check("each is one job in the table", rows == ids, f"{ids} ids, {rows} rows"),
        Check("each has one result", recorded == ids, f"{recorded}"),
        Check("none is counted twice as usage", spent <= ids, f"{spent} of {ids}"),
        Check(
            "all results read are the same text",
            len(texts) == 1 and all(status == 200 for status, _ in texts),
            f"{len(texts)} kinds of {texts.total()}",
        ),
    )


def _rows(path: Path, statement: str) -> tuple[int, int]:
    with contextlib.closing(
        sqlite3.connect(f"file:{urllib.parse.quote(str(path))}", uri=True)
    ) as db:
        first, second = db.execute(statement).fetchone()
        return int(first), int(second)
