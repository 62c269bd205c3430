"""What keys have had: counted, limited by the day, told, and kept."""

import asyncio
import json
import subprocess
import sys

import grpc
import pytest

from serve.contract.config import Config
from serve.contract.errors import OverloadedError
from serve.contract.keys import Key
from serve.contract.messages import Request
from serve.contract.server_config import ServerConfig
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey
from serve.gateway.usage import FILE, Usage, UsageRecord, add_usage, read_usage
from serve.wire.client import TritonClient
from tests.gateways import INFER, WAIT_S, Clock, full_disk, json_request, message, until
from tests.jobs import ALICE, BOB, keys_of
from tests.serve.gateway.live.sessions import refused_session

MIDNIGHT_S = 1_798_761_600.0  # of 2027-01-01
DAYS = ("2026-12-31", "2027-01-01")
ANSWER_S = 1.5  # of audio, as the stand-in for Triton tells
UNWRITABLE = f"/proc/{FILE}"


@pytest.fixture
def clock():
    return Clock(MIDNIGHT_S - 90)


@pytest.fixture
def path(tmp_path):
    return tmp_path / FILE


@pytest.fixture
def usage(path, clock):
    return usage_of(path, clock)


def usage_of(path, clock):
    return Usage(Config(server=ServerConfig(usage_file=str(path))), path.parent, clock)


def caller(most_s, name="alice"):
    return ApiKey(name, Key("", audio_s_per_day=most_s))


def refused(usage, caller):
    with pytest.raises(ApiError) as caught:
        usage.require(caller)
    return caught.value


# ---------------------------------------------------------------- a process's counting


def test_a_day_is_used_up_until_midnight_in_utc(usage, clock):
    usage.count("alice", "demo", 1, 99.5)
    usage.require(caller(100.0))
    usage.count("alice", "other", 1, 20.0)  # was under way, and is finished
    refusal = refused(usage, caller(100.0))
    assert (refusal.reason, refusal.retry_after_s) == ("insufficient_quota", 90)
    for other in (caller(100.0, "bob"), caller(0.0), ApiKey("")):
        usage.require(other)
    clock.now_s = MIDNIGHT_S - 0.5
    assert refused(usage, caller(100.0)).retry_after_s == 1
    clock.now_s = MIDNIGHT_S
    usage.require(caller(100.0))


def test_days_are_kept_apart_whenever_they_are_written(usage, clock, path):
    async def scene():
        usage.count("alice", "demo", 1, 10.0)
        await usage.exchange()
        usage.count("alice", "demo", 1, 5.0)
        clock.now_s = MIDNIGHT_S
        usage.count("alice", "demo", 1, 7.0)
        assert refused(usage, caller(7.0))  # before the new day's first look at the file
        usage.require(caller(8.0))
        assert await usage.rows("bob", *DAYS) == []
        return await usage.rows("alice", *DAYS), await usage.rows("alice", DAYS[1], DAYS[1])

    both, second = asyncio.run(scene())
    assert both == [
        UsageRecord(DAYS[0], "alice", "demo", 2, 15.0),
        UsageRecord(DAYS[1], "alice", "demo", 1, 7.0),
    ]
    assert second == both[1:]


@pytest.mark.nightly
def test_processes_that_write_at_once_lose_nothing(path):
    code = (
        "import sys; from pathlib import Path\n"
        "from serve.gateway.usage import UsageRecord, add_usage\n"
        "row = UsageRecord('2027-01-01', 'alice', 'demo', 1, 2.0)\n"
        "for _ in range(50):\n"
        "    add_usage(Path(sys.argv[1]), [row], row.day)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
    assert [one.wait(WAIT_S) for one in processes] == [0, 0]
    assert read_usage(path, *DAYS) == [UsageRecord(DAYS[1], "alice", "demo", 100, 200.0)]


def test_a_full_disk_is_logged_and_nothing_is_lost(usage, path, caplog):
    async def scene():
        usage.count("alice", "demo", 1, 1.0)
        await usage.exchange()
        for _ in range(3):
            usage.count("alice", "demo", 1, 10.0)
            with full_disk():
                await usage.exchange()
        assert refused(usage, caller(31.0))
        usage.require(caller(31.5))
        with full_disk(), pytest.raises(ApiError, match="log says why") as caught:
            await usage.rows("alice", *DAYS)
        assert caught.value.status.http == 503
        return await usage.rows("alice", *DAYS)

    assert asyncio.run(scene()) == [UsageRecord(DAYS[0], "alice", "demo", 4, 31.0)]
    assert {record.max_lines for record in caplog.records} == {1}, "of a minute"
    assert caplog.messages[0].startswith(f"{path} cannot be used to count usage: ")


# ---------------------------------------------------------------- at the gateway's doors


@pytest.fixture
def keys_file(tmp_path):
    return keys_of(tmp_path, alice={"audio_s_per_day": 2 * ANSWER_S})


def rows_of(running, query="", headers=None):
    status, _, body = running.ask("GET", f"/v1/usage{query}", headers=headers)
    assert status == 200, body
    return json.loads(body)["data"]


def check_refused_everywhere(running):
    """Check that all requests of the key are refused before they are looked at."""
    status, headers, body = running.ask("POST", "/v1/audio/transcriptions", "", ALICE)
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (429, *2 * ("insufficient_quota",))
    assert "alice has used up its audio_s_per_day" in error["message"]
    assert f"try again in {headers['retry-after']} s" in error["message"]
    assert 0 < int(headers["retry-after"]) <= 86_400
    assert running.ask("POST", "/v1/audio/translations", "", ALICE)[0] == 429
    status, headers, _ = running.ask("POST", INFER, b"{}", ALICE)
    assert (status, 0 < int(headers["retry-after"]) <= 86_400) == (429, True)
    with pytest.raises(grpc.RpcError) as caught:
        running.call()(message(), timeout=WAIT_S, metadata=tuple(ALICE.items()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(caught.value.trailing_metadata())["retry-after"]) > 0
    stream = TritonClient(running.grpc, key="secret-a")
    with stream as client, pytest.raises(OverloadedError, match="audio_s_per_day"):
        list(client.stream(Request(b"RIFF")))
    assert refused_session(running, additional_headers=ALICE)[0] == 429


def test_a_key_whose_day_is_used_up(start, keys_file):
    running = start(keys_file=keys_file)
    with TritonClient(running.grpc, key="secret-a") as client:
        client.transcribe(b"RIFF")
        with pytest.raises(OverloadedError, match="none"):
            client.transcribe(b"RIFF", prompt="error:OverloadedError: none")  # did no work
        list(client.stream(Request(b"RIFF", prompt="one two")))
    check_refused_everywhere(running)
    (row,) = rows_of(running, headers=ALICE)
    assert row == {
        "day": running.services.usage.day,
        "model": "demo",
        "requests": 2,
        "audio_seconds": 2 * ANSWER_S,
    }
    assert running.ask("POST", INFER, json.dumps(json_request()), BOB)[0] == 200
    assert [one["requests"] for one in rows_of(running, headers=BOB)] == [1]
    page = running.page()
    assert 'earshot_gateway_refused_total{reason="insufficient_quota"} 6.0' in page


def test_a_day_stays_used_up_after_a_restart_and_at_another_gateway(start, keys_file, path):
    first = start(keys_file=keys_file, usage_file=str(path))
    beside = start(keys_file=keys_file, usage_file=str(path))
    with TritonClient(first.grpc, key="secret-a") as client:
        for _ in range(2):
            client.transcribe(b"RIFF")
    until(lambda: beside.ask("POST", INFER, b"{}", ALICE)[0] == 429)  # within a second or two
    first.run(first.services.usage.close())
    check_refused_everywhere(start(keys_file=keys_file, usage_file=str(path)))


def test_usage_of_several_days(start, path):
    """Without keys it is everybody's."""
    rows = [UsageRecord(day, "", model, 1, 3600.0) for day in DAYS for model in ("demo", "turbo")]
    rows.append(UsageRecord(DAYS[0], "alice", "demo", 1, 3600.0))  # of when there were keys
    add_usage(path, rows, DAYS[0])
    running = start(usage_file=str(path))
    told = rows_of(running, f"?start={DAYS[0]}&end={DAYS[1]}")
    assert [(one["day"], one["model"]) for one in told] == [
        (day, model) for day in DAYS for model in ("demo", "turbo")
    ]
    assert len(rows_of(running, f"?start={DAYS[1]}&end={DAYS[1]}")) == 2
    assert len(rows_of(running, f"?end={DAYS[0]}")) == 2  # from its month's beginning
    assert rows_of(running, f"?end={DAYS[1]}")[0]["day"] == DAYS[1]
    assert running.ask("POST", INFER, json.dumps(json_request()))[0] == 200
    (today,) = rows_of(running)
    assert today["audio_seconds"] == ANSWER_S


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?start=soon", "start"),
        ("?end=2027-02-30", "end"),
        ("?start=2027-01-02&end=2027-01-01", "start"),
        ("?key=alice", "key"),
    ],
)
def test_what_cannot_be_asked(shared, query, param):
    status, _, body = shared.ask("GET", f"/v1/usage{query}")
    assert (status, json.loads(body)["error"]["param"]) == (400, param)


@pytest.mark.parametrize("kind", ["unwritable", "folder", "other"])
def test_requests_are_answered_where_nothing_can_be_written(
    start, keys_file, tmp_path, caplog, kind
):
    other = tmp_path / "other"
    other.write_text("this is no database, " * 100)
    path = {"unwritable": UNWRITABLE, "folder": tmp_path, "other": other}[kind]
    running = start(keys_file=keys_file, usage_file=str(path))
    with TritonClient(running.grpc, key="secret-a") as client:
        for _ in range(2):
            client.transcribe(b"RIFF")
    check_refused_everywhere(running)
    status, _, body = running.ask("GET", "/v1/usage", headers=ALICE)
    assert (status, "log says why" in json.loads(body)["error"]["message"]) == (503, True)
    assert f"{path} cannot be used" in caplog.text
    assert f"earshot_gateway_unwritten_usage_seconds {2 * ANSWER_S}" in running.page()
