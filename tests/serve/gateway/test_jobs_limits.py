"""Jobs under attack: what one key's jobs take from others, and what is away and comes back."""

import contextlib
import dataclasses
import http.server
import json
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from serve.contract.errors import FileError
from serve.gateway.jobs.table import Table
from tests.gateways import WAIT_S, until
from tests.jobs import (
    ALICE,
    BOB,
    JOBS,
    accepted,
    audio_of,
    ended,
    form,
    jobs_config,
    keys_of,
    result,
    send,
    show,
)

LONG = 250_000  # bytes of a text that a request may have


class Slow:
    """A server of somebody's that answers below /slow when it is `released`, and else at once.

    `at_once`: the most slow requests that were there at a time. Of /drip a byte comes now and
    then, without an end; /led leads to `redirect`.
    """

    def __init__(self, address="127.0.0.1", port=0):
        self.released, self.waiting, self.at_once = threading.Event(), 0, 0
        self.hooks, self.asked, self.redirect = [], [], ""
        self.server = http.server.ThreadingHTTPServer((address, port), _Handler)
        self.server.slow = self
        self.port = self.server.server_port
        self.place = f"http://{address}:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,)).start()

    def wait(self):
        self.waiting += 1
        self.at_once = max(self.at_once, self.waiting)
        self.released.wait(WAIT_S)
        self.waiting -= 1

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        slow = self.server.slow
        self.rfile.read(int(self.headers["content-length"]))
        if self.path.startswith("/slow"):
            slow.wait()
        slow.hooks.append(self.path)
        self.answer(200, b"")

    def do_GET(self):
        slow = self.server.slow
        slow.asked.append(self.path)
        if self.path == "/led":
            self.answer(302, b"", slow.redirect)
        elif self.path == "/drip":
            self.drip(slow)
        else:
            if self.path.startswith("/slow"):
                slow.wait()
            self.answer(200, b"RIFF from outside")

    def drip(self, slow):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not slow.released.wait(0.02):
                self.wfile.write(b"R")

    def answer(self, status, body, location=""):
        with contextlib.suppress(OSError):  # whoever asked has gone
            self.send_response(status)
            if location:
                self.send_header("location", location)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Who waits for work looks for it more often."""
    monkeypatch.setattr("serve.gateway.jobs.workers.LOOK_S", 0.05)


@pytest.fixture
def slow():
    with contextlib.closing(Slow()) as slow:
        yield slow


@pytest.fixture
def config(tmp_path, slow):
    return jobs_config(tmp_path, slow.place)


@pytest.fixture
def keys_file(tmp_path):
    return keys_of(tmp_path)


def transcribe(running, headers=()):
    """The status of a request that has nothing to do with jobs."""
    body, kind = form(prompt="hello")
    return running.ask("POST", "/v1/audio/transcriptions", body, {**kind, **dict(headers)})[0]


# ---------------------------------------------------------------- what a key's jobs take


def test_fields_and_results_count_until_they_are_forgotten(start, config, keys_file):
    few = dataclasses.replace(config, max_queued_mb=2)
    running = start(jobs=few, keys_file=keys_file)
    texts = {"prompt": "x" * LONG, "hotwords": "y" * LONG}
    statuses = []
    while len(statuses) < 10 and 429 not in statuses:
        status, job = send(running, headers=ALICE, **texts)
        statuses.append(status)
        if status == 202:
            ended(running, job["id"], ALICE)
    assert statuses[-1] == 429, "its share of 1 MiB is used up by jobs that have ended"
    assert "jobs.max_queued_mb" in job["message"]
    accepted(running, headers=BOB)


def test_jobs_that_come_at_once_do_not_all_find_room(start, config):
    running = start(jobs=dataclasses.replace(config, max_queued_mb=1))
    body, kind = form(prompt="wait", hotwords="y" * LONG, prefix="z" * LONG)

    def ask(_):
        return running.ask("POST", JOBS, body, kind)[0]

    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(ask, range(12)))
    assert set(statuses) == {202, 429}
    assert statuses.count(202) <= 3


def test_the_texts_of_ignored_fields_are_not_kept(start, config):
    running = start(jobs=config)
    ids = [accepted(running, zebra="z" * 2 * LONG)["id"] for _ in range(20)]
    ended(running, ids[-1])
    kept = sum(path.stat().st_size for path in Path(config.folder).glob("jobs.sqlite*"))
    assert kept < 8 * LONG
    _, text = result(running, ids[-1])
    assert json.loads(text)["warnings"] == ["the field 'zebra' is unknown and was ignored"]


def test_lists_take_no_memory_for_what_they_do_not_tell(start, config):
    running = start(jobs=dataclasses.replace(config, workers=1))
    texts = {"hotwords": "y" * LONG, "prefix": "z" * LONG}
    for _ in range(60):
        accepted(running, prompt=f"wait {'x' * LONG}", **texts)
    until(lambda: running.triton.waiting)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_kb("VmRSS")

    def page(_):
        return json.loads(running.ask("GET", f"{JOBS}?limit=60")[2])["data"]

    with ThreadPoolExecutor(8) as threads:
        assert {len(jobs) for jobs in threads.map(page, range(8))} == {60}
    assert memory_kb("VmHWM") - before < 40_000, "all their fields once are 45 MB"


def memory_kb(name):
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    ]
    return int(line.split()[1])


def test_slow_urls_keep_no_other_job_waiting(start, config, keys_file, slow):
    running = start(jobs=dataclasses.replace(config, workers=1), keys_file=keys_file)
    late = [accepted(running, None, headers=ALICE, url=f"{slow.place}/slow/{i}") for i in range(12)]
    until(lambda: slow.waiting)
    own = accepted(running, headers=ALICE)
    others = [accepted(running, headers=BOB), accepted(running, None, BOB, url=f"{slow.place}/a")]
    assert ended(running, own["id"], ALICE)["status"] == "completed"
    for job in others:
        assert ended(running, job["id"], BOB)["status"] == "completed"
    assert slow.at_once < len(late), "a key has a few fetches at a time"
    slow.released.set()
    for job in late:
        assert ended(running, job["id"], ALICE)["status"] == "completed"


def test_a_fetched_job_waits_for_its_turn(start, config, keys_file, slow):
    """And is still cancelled, and not fetched again where there is no room for it."""
    running = start(jobs=dataclasses.replace(config, workers=1), keys_file=keys_file)
    first = accepted(running, headers=BOB, prompt="wait")
    until(lambda: running.triton.waiting)
    urls = [
        accepted(running, None, ALICE, url=f"{slow.place}/a", prompt=str(i))["id"] for i in range(2)
    ]
    until(lambda: len(audio_of(config)) == 3)
    assert show(running, urls[1], ALICE)["status"] == "in_progress"
    assert running.ask("POST", f"{JOBS}/{urls[0]}/cancel", b"", ALICE)[0] == 200
    running.triton.release()
    assert ended(running, first["id"], BOB)["status"] == "completed"
    done = ended(running, urls[1], ALICE)
    assert (done["status"], done["tries"]) == ("completed", 1)
    assert show(running, urls[0], ALICE)["status"] == "cancelled"
    assert len(running.triton.requests) == 2


def test_a_url_that_drips_is_given_up(start, config, slow, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.MOST_BACK_OFF_S", 0.01)
    running = start(jobs=dataclasses.replace(config, tries=1, fetch_mb_timeout_s=0.2))
    job = ended(running, accepted(running, None, url=f"{slow.place}/drip")["id"])
    assert (job["status"], job["tries"]) == ("failed", 2)


def test_slow_webhooks_of_a_key_do_not_delay_anothers(start, config, keys_file, slow):
    running = start(jobs=config, keys_file=keys_file)
    for i in range(24):
        accepted(running, headers=ALICE, webhook_url=f"{slow.place}/slow/{i}")
    until(lambda: slow.waiting >= 8)
    job = accepted(running, headers=BOB, webhook_url=f"{slow.place}/hook")
    until(lambda: "/hook" in slow.hooks)
    until(lambda: show(running, job["id"], BOB)["webhook"]["status"] == "delivered")
    assert slow.at_once < 24
    slow.released.set()
    until(lambda: len(slow.hooks) == 25)


@pytest.fixture
def long_jobs(start, config, keys_file):
    """A gateway, and a long job of each key's that is completed."""
    running = start(jobs=config, keys_file=keys_file)
    ids = [
        accepted(running, headers=key, prompt="one two " * 1500, response_format="srt")["id"]
        for key in (ALICE, BOB)
    ]
    for id, key in zip(ids, (ALICE, BOB), strict=True):
        assert ended(running, id, key)["status"] == "completed"
    return running, *ids


def test_readers_of_one_result_share_it(long_jobs):
    running, id, _ = long_jobs
    began = time.monotonic()
    alone = result(running, id, "", ALICE)
    alone_s, began = time.monotonic() - began, time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: result(running, id, "", ALICE), range(16)))
    assert answers == [alone] * 16
    assert time.monotonic() - began < 8 * alone_s


def test_a_keys_results_are_written_one_after_another(long_jobs):
    running, id, others = long_jobs
    done, statuses = [], []

    def read(width):
        statuses.append(result(running, id, f"?max_line_width={width}", ALICE)[0])
        done.append(width)

    threads = [threading.Thread(target=read, args=(20 + i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    assert result(running, others, "", BOB)[0] == 200
    assert len(done) <= 5, "it has not waited for all of the other key's"
    for thread in threads:
        thread.join()
    assert statuses == [200] * 16


# ---------------------------------------------------------------- what is away, and comes back


def test_a_damaged_table_keeps_the_rest_of_the_server_going(start, config, caplog):
    path = Path(config.folder) / "jobs.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"no database " * 1000)
    running = start(jobs=config)
    for method, body in (("GET", None), ("POST", form()[0])):
        status, _, answer = running.ask(method, JOBS, body, form()[1])
        assert (status, "jobs" in json.loads(answer)["error"]["message"]) == (503, True)
    assert transcribe(running) == 200
    assert running.ask("GET", "/health")[0] == 200
    until(lambda: "jobs.sqlite: file is not a database; restore the file" in caplog.text)
    assert path.read_bytes() == b"no database " * 1000
    path.rename(path.with_name("damaged"))
    until(lambda: running.ask("GET", JOBS)[0] == 200)
    assert ended(running, accepted(running)["id"])["status"] == "completed"


def test_a_table_of_before_is_taken_over(start, config):
    """One that does not count what is stored."""
    running = start(jobs=config)
    job = accepted(running)
    ended(running, job["id"])
    running.run(running.gateway.jobs.close())
    path = Path(config.folder) / "jobs.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP INDEX earshot_jobs_load")
        connection.execute("ALTER TABLE earshot_jobs DROP COLUMN stored_bytes")
    again = start(jobs=config)
    assert result(again, job["id"])[0] == 200
    assert ended(again, accepted(again)["id"])["status"] == "completed"


def test_a_job_whose_adding_seemed_to_fail_is_whole(start, config, monkeypatch):
    """Its client sends it again under the same key, and gets the job that has been added."""
    add, fails = Table.add, [FileError("the answer was lost")]

    def added(table, job):
        kept = add(table, job)
        if fails:
            raise fails.pop()
        return kept

    monkeypatch.setattr(Table, "add", added)
    running = start(jobs=dataclasses.replace(config, below=1))
    once = {"idempotency-key": "mine"}
    assert send(running, headers=once)[0] == 503
    job = accepted(running, headers=once)
    assert ended(running, job["id"])["status"] == "completed"
    assert len(json.loads(running.ask("GET", JOBS)[2])["data"]) == 1


def test_jobs_wait_for_a_postgresql_that_is_down(start, config, postgresql, monkeypatch):
    """None is lost, and the rest of the server goes on, also one that starts meanwhile."""
    monkeypatch.setattr("serve.gateway.jobs.runner.LEASE_S", 1.0)
    with_table = dataclasses.replace(config, database=postgresql.get_uri(), workers=1)
    running = start(jobs=with_table)
    ids = [accepted(running, prompt="wait")["id"], accepted(running)["id"]]
    until(lambda: running.triton.waiting)
    postgresql.stop()
    try:
        later = start(jobs=with_table)
        for one in (running, later):
            assert send(one)[0] == 503
            assert one.ask("GET", JOBS)[0] == 503
            assert transcribe(one) == 200
        running.triton.release()
    finally:
        postgresql.ensure_postgres_running()
    for one in (running, later):
        until(lambda one=one: one.ask("GET", JOBS)[0] == 200)
        ids.append(accepted(one)["id"])

    def all_ended():
        for one in (running, later):
            one.triton.release()
        return all(show(running, id)["ended_at"] for id in ids)

    until(all_ended)
    assert {show(running, id)["status"] for id in ids} == {"completed"}


def test_a_postgresql_that_stands_still_is_not_waited_for(
    start, config, postgresql, monkeypatch, caplog
):
    monkeypatch.setattr("serve.gateway.jobs.keeper.TABLE_S", 0.5)
    running = start(jobs=dataclasses.replace(config, database=postgresql.get_uri()))
    job = accepted(running)
    ended(running, job["id"])
    processes = [psutil.Process(postgresql.get_pid())]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        assert running.ask("GET", f"{JOBS}/{job['id']}")[0] == 503
        assert transcribe(running) == 200
        until(lambda: "no answer within 0.5 s" in caplog.text)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    until(lambda: running.ask("GET", f"{JOBS}/{job['id']}")[0] == 200)


def test_texts_that_postgresql_does_not_take(start, config, postgresql):
    running = start(jobs=dataclasses.replace(config, database=postgresql.get_uri()))
    assert running.ask("GET", f"{JOBS}/%00")[0] == 404
    body, kind = form()
    body = body.replace(b"talk.wav", b"ta\0lk.wav")
    status, _, answer = running.ask("POST", JOBS, body, kind)
    assert (status, json.loads(answer).get("filename")) == (202, "talk.wav")
    ended(running, json.loads(answer)["id"])


# ---------------------------------------------------------------- names that point elsewhere


class Names:
    """A resolver whose name `evil.example.org` points to one address after the other."""

    def __init__(self, monkeypatch, *addresses):
        self.addresses, self.asked, found = list(addresses), 0, socket.getaddrinfo
        names = self

        def getaddrinfo(host, port, *args, **kwargs):
            if host not in ("evil.example.org", b"evil.example.org"):
                return found(host, port, *args, **kwargs)
            address = names.addresses[min(names.asked, len(names.addresses) - 1)]
            names.asked += 1
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def servers():
    """One that is allowed, at 127.0.0.2, and one at 127.0.0.1, where nobody is to go."""
    with contextlib.ExitStack() as stack:
        allowed = stack.enter_context(contextlib.closing(Slow("127.0.0.2")))
        inside = stack.enter_context(contextlib.closing(Slow("127.0.0.1", allowed.port)))
        yield allowed, inside


@pytest.fixture
def evil(config, servers):
    place = f"http://evil.example.org:{servers[0].port}"
    networks = ("127.0.0.2/32",)
    return dataclasses.replace(config, allowed_hosts=(place,), allowed_networks=networks)


def test_the_address_that_was_checked_is_the_one_that_is_gone_to(start, evil, servers, monkeypatch):
    names, (allowed, inside) = Names(monkeypatch, "127.0.0.2", "127.0.0.1"), servers
    running = start(jobs=evil)
    job = accepted(running, None, url=f"{evil.allowed_hosts[0]}/a")
    assert ended(running, job["id"])["status"] == "completed"
    assert (names.asked, allowed.asked, inside.asked) == (1, ["/a"], [])


def test_a_redirect_is_checked_by_the_address_that_is_gone_to(start, evil, servers, monkeypatch):
    names, (allowed, inside) = Names(monkeypatch, "127.0.0.2", "127.0.0.1"), servers
    allowed.redirect = f"{evil.allowed_hosts[0]}/b"
    running = start(jobs=evil)
    job = ended(running, accepted(running, None, url=f"{evil.allowed_hosts[0]}/led")["id"])
    assert (job["status"], "inside" in job["error"]["message"]) == ("failed", True)
    assert (names.asked, allowed.asked, inside.asked) == (2, ["/led"], [])


def test_a_webhook_does_not_go_inside(start, evil, servers, monkeypatch):
    names = Names(monkeypatch, "127.0.0.1")
    running = start(jobs=evil)
    job = accepted(running, webhook_url=f"{evil.allowed_hosts[0]}/hook")
    until(lambda: show(running, job["id"])["webhook"]["tries"])
    until(lambda: 'webhook_tries_total{outcome="failed"} 1.0' in running.page())
    assert names.asked and not servers[1].hooks
