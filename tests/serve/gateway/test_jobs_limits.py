"""Jobs under attack: what one key's jobs take from others, and what is away and comes back."""

import contextlib
import dataclasses
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve.contract.config import RuntimeConfig
from serve.contract.errors import FileError
from serve.gateway.jobs import wire
from serve.gateway.jobs.table import JobTable
from tests.gateways import FORM, form, until
from tests.jobs import (
    ALICE,
    BOB,
    JOBS,
    Hearer,
    accepted,
    audio_of,
    ended,
    keys_of,
    result,
    send,
    show,
)

LONG = 250_000  # bytes of a text that a request may have


@pytest.fixture
def keys_file(tmp_path):
    return keys_of(tmp_path)


# ---------------------------------------------------------------- what a key's jobs take


def test_fields_and_results_count_until_they_are_forgotten(keyed, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.routes.MAX_QUEUED_MB", 2)
    running = keyed
    texts = {"prompt": "x" * LONG, "hotwords": "y" * LONG}
    statuses = []
    while len(statuses) < 10 and 429 not in statuses:
        status, job = send(running, headers=ALICE, **texts)
        statuses.append(status)
        if status == 202:
            ended(running, job["id"], ALICE)
    assert statuses[-1] == 429, "its share of 1 MiB is used up by jobs that have ended"
    assert "share of 2 MiB" in job["message"]
    accepted(running, headers=BOB)


def test_jobs_that_come_at_once_do_not_all_find_room(start, config, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.routes.MAX_QUEUED_MB", 1)
    running = start(jobs=config)
    texts = {"hotwords": "y" * LONG, "prefix": "z" * LONG}

    def ask(_):
        return send(running, prompt="wait", **texts)[0]

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
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_slow_urls_keep_no_other_job_waiting(start, config, keys_file, hearer):
    running = start(jobs=dataclasses.replace(config, workers=1), keys_file=keys_file)
    late = [
        accepted(running, None, headers=ALICE, url=f"{hearer.place}/slow/{i}") for i in range(12)
    ]
    until(lambda: hearer.waiting)
    own = accepted(running, headers=ALICE)
    others = [accepted(running, headers=BOB), accepted(running, None, BOB, url=f"{hearer.place}/a")]
    assert ended(running, own["id"], ALICE)["status"] == "completed"
    for job in others:
        assert ended(running, job["id"], BOB)["status"] == "completed"
    assert hearer.at_once < len(late), "a key has a few fetches at a time"
    hearer.released.set()
    for job in late:
        assert ended(running, job["id"], ALICE)["status"] == "completed"


def test_a_fetched_job_waits_for_its_turn(start, config, keys_file, hearer):
    """And is still cancelled, and not fetched again where there is no room for it."""
    running = start(jobs=dataclasses.replace(config, workers=1), keys_file=keys_file)
    first = accepted(running, headers=BOB, prompt="wait")
    until(lambda: running.triton.waiting)
    urls = [
        accepted(running, None, ALICE, url=f"{hearer.place}/a", prompt=str(i))["id"]
        for i in range(2)
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


def test_a_url_that_drips_is_given_up(start, config, hearer, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.MAX_BACK_OFF_S", 0.01)
    monkeypatch.setattr("serve.gateway.jobs.runner.MAX_TRIES", 1)
    monkeypatch.setattr("serve.gateway.jobs.fetch.MIB_TIMEOUT_S", 0.2)
    running = start(jobs=config)
    job = ended(running, accepted(running, None, url=f"{hearer.place}/drip")["id"])
    assert (job["status"], job["tries"]) == ("failed", 2)


def test_slow_webhooks_of_a_key_do_not_delay_anothers(keyed, hearer):
    for i in range(24):
        accepted(keyed, headers=ALICE, webhook_url=f"{hearer.place}/slow/{i}")
    until(lambda: hearer.waiting >= 8)
    job = accepted(keyed, headers=BOB, webhook_url=f"{hearer.place}/hook")
    until(lambda: show(keyed, job["id"], BOB)["webhook"]["status"] == "delivered")
    assert hearer.at_once < 24
    hearer.released.set()
    until(lambda: len(hearer.hooks) == 25)


@pytest.mark.nightly
def test_a_keys_results_are_written_one_after_another(keyed, monkeypatch):
    ids = [
        accepted(keyed, headers=key, prompt="one two " * 500, response_format="srt")["id"]
        for key in (ALICE, BOB)
    ]
    for id, key in zip(ids, (ALICE, BOB), strict=True):
        assert ended(keyed, id, key)["status"] == "completed"
    render, rendered, state = wire.render_result, [], keyed.gateway.http[0].server_state

    def counted(fields, transcript, options):
        rendered.append(options)  # the first is written once all requests have come
        until(lambda: len(rendered) > 1 or len(state.connections) >= 9)
        return render(fields, transcript, options)

    monkeypatch.setattr(wire, "render_result", counted)
    with ThreadPoolExecutor(9) as threads:
        queries = [f"?max_line_width={20 + i}" for i in range(8)]
        answers = [threads.submit(result, keyed, ids[0], query, ALICE) for query in queries]
        until(lambda: rendered)
        assert result(keyed, ids[1], "", BOB)[0] == 200
        assert {answer.result()[0] for answer in answers} == {200}
    assert rendered.index([]) < 5, "it has not waited for all of the other key's"


@pytest.mark.nightly
def test_results_that_a_client_does_not_read_count_as_its_keys(start, config, keys_file):
    running = start(jobs=config, keys_file=keys_file, max_request_mb=4, max_inflight_mb=4)
    options = {"prompt": "one two " * 3000, "response_format": "verbose_json"}
    ids = [accepted(running, headers=key, **options)["id"] for key in (ALICE, BOB)]
    for id, key in zip(ids, (ALICE, BOB), strict=True):
        assert ended(running, id, key)["status"] == "completed"
    path, (authorization,) = f"{JOBS}/{ids[0]}/result", ALICE.values()
    head = f"GET {path} HTTP/1.1\r\nHost: [::1]\r\nAuthorization: {authorization}\r\n\r\n"
    with contextlib.ExitStack() as stack:

        def refusal():
            """Leave one more result unread, then ask for it once more."""
            stack.enter_context(unread(running, head.encode()))
            status, headers, _ = running.ask("GET", path, headers=ALICE)
            return headers["retry-after"] if status == 429 else None

        assert any(refusal() for _ in range(16))
        assert result(running, ids[1], "", BOB)[0] == 200
        assert running.transcribe(headers=BOB)[0] == 200
    until(lambda: result(running, ids[0], "", ALICE)[0] == 200)


def test_a_result_that_a_client_does_not_read_keeps_no_job_waiting(start, config):
    running = start(jobs=config, runtime=RuntimeConfig(slots=1))
    options = {"prompt": "one two " * 3000, "response_format": "verbose_json"}
    id = accepted(running, **options)["id"]
    assert ended(running, id)["status"] == "completed"
    head = f"GET {JOBS}/{id}/result HTTP/1.1\r\nHost: [::1]\r\n\r\n"
    with unread(running, head.encode()):
        assert ended(running, accepted(running)["id"])["status"] == "completed"


@contextlib.contextmanager
def unread(running, head):
    """A connection; the answer to `head` begins and is not read. The system keeps little of it."""
    host, _, port = running.http.rpartition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.connect((host, int(port)))
        connection.sendall(head)
        assert connection.recv(1)
        yield


# ---------------------------------------------------------------- what is away, and comes back


def test_a_damaged_table_keeps_the_rest_of_the_server_going(start, config, caplog):
    path = Path(config.folder) / "jobs.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"no database " * 1000)
    running = start(jobs=config)
    for method, body in (("GET", None), ("POST", form())):
        status, _, answer = running.ask(method, JOBS, body, FORM)
        assert (status, "jobs" in json.loads(answer)["error"]["message"]) == (503, True)
    assert running.transcribe()[0] == 200
    assert running.ask("GET", "/health")[0] == 200
    until(lambda: "jobs.sqlite: file is not a database; restore the file" in caplog.text)
    assert path.read_bytes() == b"no database " * 1000
    path.rename(path.with_name("damaged"))
    until(lambda: running.ask("GET", JOBS)[0] == 200)
    assert ended(running, accepted(running)["id"])["status"] == "completed"


def test_a_job_whose_adding_seemed_to_fail_is_whole(start, config, monkeypatch):
    """Its client sends it again under the same key, and gets the job that has been added."""
    add, fails = JobTable.add, [FileError("the answer was lost")]

    def added(table, job):
        kept = add(table, job)
        if fails:
            raise fails.pop()
        return kept

    monkeypatch.setattr(JobTable, "add", added)
    running = start(jobs=config, runtime=RuntimeConfig(slots=1))
    once = {"idempotency-key": "mine"}
    assert send(running, headers=once)[0] == 503
    job = accepted(running, headers=once)
    assert ended(running, job["id"])["status"] == "completed"
    assert len(json.loads(running.ask("GET", JOBS)[2])["data"]) == 1


# ---------------------------------------------------------------- names that point elsewhere


class Names:
    """A resolver that points `evil.example.org` to one address after the other."""

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
    """A server that is allowed, at 127.0.0.2, and one at 127.0.0.1 that is not."""
    with contextlib.ExitStack() as stack:
        allowed = stack.enter_context(contextlib.closing(Hearer("127.0.0.2")))
        inside = stack.enter_context(contextlib.closing(Hearer("127.0.0.1", allowed.port)))
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
    allowed.statuses = [f"{evil.allowed_hosts[0]}/b"]
    running = start(jobs=evil)
    job = ended(running, accepted(running, None, url=f"{evil.allowed_hosts[0]}/led")["id"])
    assert (job["status"], "private address" in job["error"]["message"]) == ("failed", True)
    assert "127.0.0.1" not in job["error"]["message"]
    assert (names.asked, allowed.asked, inside.asked) == (2, ["/led"], [])


def test_a_webhook_does_not_go_inside(start, evil, servers, monkeypatch):
    names = Names(monkeypatch, "127.0.0.1")
    running = start(jobs=evil)
    job = accepted(running, webhook_url=f"{evil.allowed_hosts[0]}/hook")
    until(lambda: show(running, job["id"])["webhook"]["tries"])
    until(lambda: 'webhook_tries_total{outcome="failed"} 1.0' in running.page())
    assert names.asked and not servers[1].hooks
