"""Jobs: accepted, kept whatever dies, done once, told by a webhook."""

import base64
import dataclasses
import hashlib
import hmac
import http.client
import http.server
import json
import threading
from pathlib import Path

import pytest

from serve.contract.config import RuntimeConfig
from serve.contract.errors import ConfigError, FileError
from serve.contract.server_config import JobsConfig
from serve.gateway.jobs.fetch import is_private
from serve.gateway.jobs.table import JobTable
from serve.gateway.jobs.webhooks import read_secret, signed
from tests.gateways import full_disk, until
from tests.jobs import ALICE, BOB, JOBS, SECRET, accepted, audio_of, ended, result, send, show

FORBIDDEN = [
    "http://files.example.org/a.mp3",
    "https://me:pw@files.example.org/a.mp3",
    "https://files.example.org.evil.example/a.mp3",
    "file:///etc/passwd",
    "https://files.example.org/ä.mp3",
    "s3://bucket/a.mp3",
]


@pytest.fixture
def running(start, config):
    return start(jobs=config)


# ---------------------------------------------------------------- from the door to the end


def test_a_job_is_done_and_its_result_is_had_in_every_format(running, config):
    job = accepted(
        running,
        prompt="one two",
        response_format="verbose_json",
        **{"timestamp_granularities[]": "word"},
    )
    assert (job["object"], job["status"], job["filename"]) == ("audio.job", "queued", "talk.wav")
    done = ended(running, job["id"])
    assert (done["status"], done["duration"], done["tries"]) == ("completed", 1.5, 1)
    until(lambda: audio_of(config) == [])
    assert [file[:] for file in running.triton.files.values()] == [b"RIFF"]
    assert list(running.services.engines.uploads.iterdir()) == []
    status, text = result(running, job["id"])
    verbose = json.loads(text)
    assert (status, verbose["text"]) == (200, "one two")
    assert [word["word"] for word in verbose["words"]] == ["one", "two"]
    assert json.loads(result(running, job["id"], "?response_format=json")[1])["text"] == "one two"
    assert result(running, job["id"], "?response_format=text") == (200, "one two\n")
    assert "00:00:00,000 -->" in result(running, job["id"], "?response_format=srt")[1]
    marked = result(running, job["id"], "?response_format=vtt&highlight_words=true")[1]
    assert marked.startswith("WEBVTT") and "<u>two</u>" in marked
    for query, param in (
        ("?response_format=diarized_json", "response_format"),
        ("?response_format=loud", "response_format"),
        ("?beam_size=3", "beam_size"),
    ):
        status, text = result(running, job["id"], query)
        assert (status, json.loads(text)["error"]["param"]) == (400, param)


def test_words_come_only_where_the_job_asked_for_them(running):
    job = accepted(running, prompt="one two")
    ended(running, job["id"])
    assert "WORD_TIMESTAMPS" not in str(list(running.triton.requests.values())[-1].inputs)
    query = "?response_format=srt&highlight_words=true"
    status, text = result(running, job["id"], query)
    assert (status, "highlight_words" in text) == (400, True)
    assert result(running, job["id"], "?response_format=srt")[0] == 200


def test_what_cannot_be_done_is_refused_by_name(running):
    for fields, param in (
        ({"beam_sise": 3}, "beam_sise"),
        ({"stream": "true"}, "stream"),
        ({"url": "https://files.example.org/a.mp3"}, "url"),
        ({"webhook_url": "http://files.example.org/"}, "webhook_url"),
        ({"model": "nobody"}, "model"),
        ({"response_format": "json", "max_line_count": "1"}, "max_line_count"),
        *(({"audio": None, "url": url}, "url") for url in FORBIDDEN),
    ):
        status, error = send(running, **fields)
        assert (status in (400, 404), error["param"]) == (True, param), fields


def test_without_a_folder_there_are_none(start):
    running = start()
    status, error = send(running)
    assert (status, "jobs.folder" in error["message"]) == (404, True)
    assert running.ask("GET", JOBS)[0] == 404


def test_a_failed_job_tells_the_error(running, config):
    job = ended(running, accepted(running, prompt="error:AudioError: no audio")["id"])
    assert job["status"] == "failed"
    assert job["error"]["code"] == "invalid_audio"
    assert job["error"]["message"] == "no audio"
    until(lambda: audio_of(config) == [])
    status, text = result(running, job["id"])
    assert (status, json.loads(text)["error"]["code"]) == (409, "job_failed")


def test_a_job_is_cancelled_while_it_is_worked_on(start, config):
    running = start(jobs=dataclasses.replace(config, workers=1))
    first = accepted(running, prompt="wait")
    until(lambda: running.triton.waiting)
    second = accepted(running, prompt="two")
    status, text = result(running, first["id"])
    assert (status, json.loads(text)["error"]["code"]) == (409, "job_open")
    for job in (second, first):
        status, _, body = running.ask("POST", f"{JOBS}/{job['id']}/cancel", b"")
        assert (status, json.loads(body)["status"]) == (200, "cancelled")
    until(lambda: running.triton.cancelled)
    until(lambda: running.services.admission.requests == 0)
    third = ended(running, accepted(running)["id"])
    status, _, body = running.ask("POST", f"{JOBS}/{third['id']}/cancel", b"")
    assert (status, json.loads(body)["status"]) == (200, "completed")
    assert show(running, first["id"])["status"] == "cancelled"
    assert len(running.triton.requests) == 2


def test_jobs_of_other_keys_are_not_there(keyed):
    assert send(keyed)[0] == 401
    ids = [accepted(keyed, headers=ALICE)["id"] for _ in range(3)]
    other = accepted(keyed, headers=BOB)["id"]
    assert keyed.ask("GET", f"{JOBS}/{other}", headers=ALICE)[0] == 404
    assert keyed.ask("POST", f"{JOBS}/{other}/cancel", b"", ALICE)[0] == 404

    def page(query=""):
        status, _, body = keyed.ask("GET", JOBS + query, headers=ALICE)
        assert status == 200, body
        found = json.loads(body)
        return [job["id"] for job in found["data"]], found["has_more"]

    assert page() == (ids[::-1], False)
    assert page("?limit=2") == ([ids[2], ids[1]], True)
    assert page(f"?limit=2&after={ids[1]}") == ([ids[0]], False)
    assert keyed.ask("GET", f"{JOBS}?after={other}", headers=ALICE)[0] == 404
    assert keyed.ask("GET", f"{JOBS}?limit=0", headers=ALICE)[0] == 400


def test_a_jobs_request_counts_as_any_of_its_key(keyed):
    ids = [accepted(keyed, headers=BOB)["id"] for _ in range(2)]
    ended(keyed, ids[0], BOB)
    until(lambda: 'refused_total{reason="key_limit"}' in keyed.page())  # one a minute
    until(lambda: show(keyed, ids[1], BOB)["status"] == "queued")
    ended(keyed, accepted(keyed, headers=ALICE)["id"], ALICE)  # who does not wait for bob
    _, _, body = keyed.ask("GET", "/v1/usage", headers=BOB)
    (row,) = json.loads(body)["data"]
    assert (row["requests"], row["audio_seconds"]) == (1, 1.5)
    page = keyed.page()
    assert 'earshot_gateway_audio_seconds_total{key="bob",route="jobs"} 1.5' in page
    until(lambda: 'earshot_jobs_ended_total{status="completed"} 2.0' in keyed.page())


def test_too_many_jobs_are_refused(start, config, keys_file):
    few = dataclasses.replace(config, max_queued=2, workers=1)
    running = start(jobs=few, keys_file=keys_file)
    accepted(running, headers=ALICE, prompt="wait")
    status, error = send(running, headers=ALICE)
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    accepted(running, headers=BOB, prompt="wait")
    assert send(running, headers=BOB)[0] == 429
    until(lambda: running.triton.waiting)


def test_live_requests_come_first(start, config, monkeypatch):
    claim, claimed = JobTable.claim, []

    def noted(table, work, *arguments):
        if table.name.startswith(config.folder):  # the gateways of other tests claim jobs, too
            claimed.append(work)
        return claim(table, work, *arguments)

    monkeypatch.setattr(JobTable, "claim", noted)
    running = start(jobs=config, runtime=RuntimeConfig(slots=1))
    asking = threading.Thread(target=running.transcribe, kwargs={"prompt": "wait"})
    asking.start()
    until(lambda: running.triton.waiting)
    job = accepted(running)
    claimed.clear()
    until(lambda: claimed.count("fetch") > 1)
    assert "transcribe" not in claimed and show(running, job["id"])["status"] == "queued"
    running.triton.release()
    asking.join()
    assert ended(running, job["id"])["status"] == "completed"


def test_the_same_idempotency_key_is_the_same_job(keyed):
    once = {**ALICE, "idempotency-key": "mine"}
    first = accepted(keyed, headers=once, prompt="one")
    assert accepted(keyed, headers=once, prompt="one")["id"] == first["id"]
    status, error = send(keyed, headers=once, prompt="two")
    assert (status, error["code"]) == (422, "idempotency_key_reused")
    bobs = accepted(keyed, headers={**BOB, "idempotency-key": "mine"}, prompt="one")
    assert bobs["id"] != first["id"]
    ended(keyed, first["id"], ALICE)
    assert len(keyed.triton.requests) <= 2


# ---------------------------------------------------------------- what dies, and what is put back


def test_a_job_outlives_its_gateway(start, config):
    """And is begun anew by the next one, which had not been told of it."""
    first = start(jobs=dataclasses.replace(config, workers=1))
    ids = [accepted(first, prompt="wait")["id"], accepted(first, prompt="two")["id"]]
    until(lambda: first.triton.waiting)
    first.run(first.gateway.jobs.close())
    second = start(jobs=config)
    until(lambda: second.triton.waiting)
    second.triton.release()
    for id in ids:
        assert ended(second, id)["status"] == "completed"


def test_a_server_that_is_away_costs_the_jobs_that_wait_none_of_their_tries(
    start, config, monkeypatch
):
    monkeypatch.setattr("serve.gateway.jobs.runner.MAX_BACK_OFF_S", 0.05)
    running = start(jobs=dataclasses.replace(config, workers=1))
    ended(running, accepted(running)["id"])
    running.triton.stop()
    ids = [accepted(running)["id"] for _ in range(5)]
    until(lambda: 'refused_total{reason="server_away"}' in running.page())
    running.triton.start()
    jobs = [ended(running, id) for id in ids]
    assert {job["status"] for job in jobs} == {"completed"}
    assert sum(job["tries"] for job in jobs) <= len(ids) + 1


def test_a_look_that_fails_is_not_the_last(start, config, monkeypatch, caplog):
    claim, fails = JobTable.claim, [ValueError("odd"), FileError("the database is away")]

    def claimed(*arguments):
        if fails:
            raise fails.pop(0)
        return claim(*arguments)

    monkeypatch.setattr(JobTable, "claim", claimed)
    running = start(jobs=config)
    assert ended(running, accepted(running)["id"])["status"] == "completed"
    assert "jobs cannot be looked for" in caplog.text
    assert "the database is away; jobs wait until they can be" in caplog.text


def test_a_full_disk_refuses_a_job_and_keeps_nothing_of_it(running, config):
    with full_disk():
        status, error = send(running)
    assert (status, error["code"]) == (503, "server_unavailable")
    until(lambda: audio_of(config) == [])
    assert json.loads(running.ask("GET", JOBS)[2])["data"] == []
    assert ended(running, accepted(running)["id"])["status"] == "completed"


def test_a_full_server_is_waited_for(start, config, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.FULL_S", 0.05)
    running = start(jobs=config)
    job = accepted(running, prompt="error:OverloadedError: full")
    until(lambda: len(running.triton.requests) > 2)
    found = show(running, job["id"])
    assert (found["ended_at"], found["tries"] <= 1) == (None, True)


def test_what_the_server_dies_of_has_failed_in_the_end(start, config, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.MAX_BACK_OFF_S", 0.01)
    monkeypatch.setattr("serve.gateway.jobs.runner.MAX_TRIES", 2)
    running = start(jobs=config)
    job = ended(running, accepted(running, prompt="error:UNAVAILABLE gone")["id"])
    assert (job["status"], job["tries"]) == ("failed", 3)
    assert "2 times" in job["error"]["message"]
    assert len(running.triton.requests) == 2


def test_what_ended_long_ago_is_forgotten(start, config, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.SWEEP_S", 0.05)
    running = start(jobs=dataclasses.replace(config, keep_s=0.2))
    job = accepted(running)
    until(lambda: running.ask("GET", f"{JOBS}/{job['id']}")[0] == 404)


# ---------------------------------------------------------------- webhooks


def test_a_webhook_is_signed_and_tried_again_under_one_id(start, config, hearer, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.webhooks.FIRST_S", 0.02)
    hearer.statuses = [500, 302, 204]
    running = start(jobs=config)
    job = accepted(running, webhook_url=f"{hearer.place}/hook?token=1")
    assert job["webhook_url"] == f"{hearer.place}/hook"
    until(lambda: show(running, job["id"])["webhook"]["status"] == "delivered")
    assert show(running, job["id"])["webhook"]["tries"] == len(hearer.hooks) == 3
    assert {headers["webhook-id"] for _, headers, _ in hearer.hooks} == {f"msg_{job['id']}"}
    assert len({body for _, _, body in hearer.hooks}) == 1
    for _, headers, body in hearer.hooks:
        text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        signature = base64.b64encode(hmac.digest(SECRET, text, hashlib.sha256)).decode()
        assert headers["webhook-signature"] == f"v1,{signature}"
    event = json.loads(body)
    assert (event["type"], event["data"]["id"]) == ("audio.job.completed", job["id"])
    assert event["data"]["status"] == "completed"


@pytest.mark.parametrize(("status", "limit_s"), [(410, 1000.0), (500, 0.1)])
def test_a_webhook_that_nobody_wants_is_given_up(
    start, config, hearer, monkeypatch, status, limit_s
):
    hearer.statuses = [status]
    monkeypatch.setattr("serve.gateway.jobs.webhooks.GIVE_UP_S", limit_s)
    running = start(jobs=config)
    job = accepted(running, webhook_url=hearer.place, prompt="error:AudioError: no")
    until(lambda: show(running, job["id"])["webhook"]["status"] == "given_up")
    assert json.loads(hearer.hooks[0][2])["type"] == "audio.job.failed"


# ---------------------------------------------------------------- urls


def test_audio_is_fetched_from_a_url(start, config, hearer, monkeypatch):
    monkeypatch.setattr("serve.gateway.jobs.runner.MAX_BACK_OFF_S", 0.01)
    hearer.statuses = [503, "/a.wav"]
    running = start(jobs=config)
    options = {"languages": ["en", "es"], "beam_size": 2, "prompt": "one"}
    job = accepted(running, None, url=f"{hearer.place}/b.wav?signature=1", **options)
    assert job["url"] == f"{hearer.place}/b.wav"
    done = ended(running, job["id"])
    assert (done["status"], done["tries"]) == ("completed", 2), done["error"]
    assert [file[:] for file in running.triton.files.values()] == [b"RIFF from outside"]
    missing = ended(running, accepted(running, None, url=f"{hearer.place}/none")["id"])
    assert (missing["status"], "404" in missing["error"]["message"]) == ("failed", True)
    hearer.statuses = ["http://elsewhere.example.org/"]
    led = ended(running, accepted(running, None, url=f"{hearer.place}/a.wav")["id"])
    assert "allowed_hosts" in led["error"]["message"]


@pytest.mark.parametrize(
    "target", ["http://[x", "http://a..example.org/a.wav", "http://xn--\xe4.example.org/a.wav"]
)
def test_a_redirect_to_no_url_fails_the_job_at_once(start, config, hearer, caplog, target):
    places = (hearer.place, "http://*.example.org")
    running = start(jobs=dataclasses.replace(config, allowed_hosts=places))
    hearer.statuses = [target]
    job = ended(running, accepted(running, None, url=f"{hearer.place}/a.wav")["id"])
    assert (job["status"], job["tries"], job["error"]["param"]) == ("failed", 1, "url")
    assert "Traceback" not in caplog.text
    if target.isascii():
        status, error = send(running, None, url=target)
        assert (status, error["param"]) == (400, "url")


def test_a_file_that_is_too_large_is_not_fetched(start, config, hearer):
    hearer.files["/large"] = bytes(2**20 + 1)
    running = start(jobs=config, max_request_mb=1)
    job = ended(running, accepted(running, None, url=f"{hearer.place}/large")["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "request_too_large")
    until(lambda: audio_of(config) == [])


def test_addresses_of_the_house():
    inside = "127.0.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 :: ::1 fe80::1%eth0"
    embedding = "::ffff:10.0.0.1 ::ffff:93.184.216.34 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:1::1"
    outside = "93.184.216.34 2606:2800:220:1::1 64:ff9b::5db8:d822"
    assert all(map(is_private, (*inside.split(), *embedding.split())))
    assert not any(map(is_private, outside.split()))


@pytest.mark.parametrize("text", ["whsec_c2hvcnQ=", "0123456789abcdef" * 2])
def test_a_secret_that_is_none(tmp_path, text):
    (tmp_path / "secret").write_text(text)
    with pytest.raises(ConfigError, match="whsec_"):
        read_secret(str(tmp_path / "secret"))
    with pytest.raises(FileError, match=r"none: No such file .* `echo .* makes one"):
        read_secret(str(tmp_path / "none"))


def test_the_receiver_of_the_page_knows_what_is_signed(tmp_path, monkeypatch, capsys):
    """That of docs/jobs.md, as it stands there but for its port."""
    page = (Path(__file__).parents[3] / "docs" / "jobs.md").read_text(encoding="utf-8")
    (code,) = [
        one.partition("```")[0] for one in page.split("```python\n")[1:] if "webhook-id" in one
    ]
    (tmp_path / "webhook.secret").write_text(f"whsec_{base64.b64encode(SECRET).decode()}\n")
    monkeypatch.chdir(tmp_path)
    receiver = {}
    exec(code.rpartition("http.server.HTTPServer")[0], receiver)
    body = b'{"type":"audio.job.completed"}'
    right = signed(SECRET, "msg_job_1", 1_795_643_188, body)
    with http.server.HTTPServer(("127.0.0.1", 0), receiver["Hook"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for headers, status in (
            (right, 204),
            ({**right, "webhook-timestamp": "1795643189"}, 401),
            ({name: text for name, text in right.items() if name != "webhook-signature"}, 401),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            connection.request("POST", "/hook", body, headers)
            assert connection.getresponse().status == status
            connection.close()
        server.shutdown()
    kinds = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["signed by the server", "forged", "forged"]


def test_no_url_is_fetched_where_no_place_is_named(start, tmp_path):
    running = start(jobs=JobsConfig(folder=str(tmp_path / "jobs")))
    status, error = send(running, None, url="https://files.example.org/a.mp3")
    assert (status, error["param"], "allowed_hosts" in error["message"]) == (400, "url", True)
    status, error = send(running, webhook_url="https://files.example.org/")
    assert (status, "webhook_secret_file" in error["message"]) == (400, True)
