"""What the gateway costs, measured of one before a stand-in for Triton."""

import contextlib
import socket
import threading
from pathlib import Path

import psutil
import pytest

from build.clips import Clip
from eval.gateway import floods
from eval.gateway.connections import KINDS, Kept, measure_idle, measure_kept
from eval.gateway.floods import Flood
from eval.gateway.run import Cost, Way, interval_of, measure_ways
from eval.gateway.ways import KSERVE, OPENAI, TRITON, by_form, by_grpc
from eval.gateway.ways import straight as straight_to
from serve.contract.errors import UnavailableError
from serve.wire.folder import grpc_target
from tests.gateways import WAIT_S, Running

CLIP = Path(__file__).parents[2] / "data" / "en_two.wav"


@pytest.fixture
def running(tmp_path):
    running = Running(tmp_path, 600.0)
    yield running
    running.close()


def test_every_way_gets_every_clip_as_often(running):
    said = []
    with (
        straight_to(grpc_target(running.triton.folder), WAIT_S) as straight,
        by_grpc(running.grpc, WAIT_S) as kserve,
        by_form(running.http, WAIT_S) as form,
    ):
        ways = {TRITON: straight, KSERVE: kserve, OPENAI: form}
        assert {ask(b"RIFF") for ask in ways.values()} == {"hello"}
        clips = [Clip("a", CLIP, "hello", "en", 1.5)] * 2
        found = measure_ways(ways, clips, 2, 1, psutil.Process(), said.append)
    assert [way.name for way in found] == [TRITON, KSERVE, OPENAI]
    assert found[0].share == 1.0 and all(way.rtfx > 0 for way in found)
    assert len(said) == 6  # a warm-up and a pass of each
    with by_form("127.0.0.1:1", WAIT_S) as nobody, pytest.raises(UnavailableError):
        nobody(b"RIFF")


def test_idle_connections_of_every_kind_are_there_at_once(running):
    found = list(measure_idle(running, psutil.Process(), 3, 0.1))
    assert [one.kind for one in found[1::2]] == list(KINDS)
    assert [one.connections for one in found] == [0, 3] * 3


def test_a_way_that_is_too_slow_is_not_good():
    ways = (
        Way(TRITON, 20.0, 1.0, (1.0, 1.0), 0.0, 9.0),
        Way(KSERVE, 18.8, 0.94, (0.9, 0.98), 5.0, 9.6),
    )
    kept, quiet = Kept(0.5, 1.0), Flood("quiet", 9, 0, 100.0, 110.0)
    slow, alone = Cost(ways, kept, (), (quiet,)).checks
    assert not slow.passed and "KServe" in slow.name and slow.detail == "94.0%"
    assert alone.passed
    for flood, good in (
        (Flood("pings", 9, 0, 199.0, 900.0), True),
        (Flood("pings", 9, 0, 201.0, 202.0), False),
        (Flood("pings", 9, 1, 100.0, 110.0), False),
    ):
        _, beside = Cost(ways[:1], kept, (), (quiet, flood)).checks
        assert beside.passed == good and "pings" in beside.name


def test_a_clip_is_asked_for_in_quiet_and_beside_a_flood(running, monkeypatch):
    monkeypatch.setattr(floods, "_BEFORE_S", 3.0)
    name = "bytes apart, refused"
    monkeypatch.setattr(floods, "FLOODS", {name: floods.FLOODS[name]})
    with by_form(running.http, WAIT_S) as ask:
        quiet, flooded = floods.measure_floods(running.http, ask, b"RIFF", 0.5)
    assert (quiet.name, flooded.name) == ("quiet", name)
    for found in (quiet, flooded):
        assert found.answers and not found.failures and 0 < found.median_ms <= found.longest_ms
    with by_form("127.0.0.1:1", WAIT_S) as nobody:
        (alone, *_) = floods.measure_floods("", nobody, b"", 0.01)
    assert alone.failures and not alone.answers and alone.median_ms == float("inf")


@pytest.mark.parametrize("name", floods.FLOODS)
def test_a_flood_leaves_others_their_answers(running, name):
    made, _ = floods.FLOODS[name]
    host, _, port = running.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:

        def flood():
            with contextlib.suppress(OSError):
                made()(connection)

        flooding = threading.Thread(target=flood)
        flooding.start()
        with by_form(running.http, WAIT_S) as ask:
            assert ask(b"RIFF") == "hello"
        with contextlib.suppress(OSError):  # it may have gone
            connection.shutdown(socket.SHUT_RDWR)
        flooding.join(WAIT_S)
        assert not flooding.is_alive()


def test_a_kept_connection_is_asked_again_and_again(running):
    found = measure_kept(running.http)
    assert 0 < found.median_ms <= found.p99_ms


def test_passes_are_paired_by_their_rounds():
    """What slows a whole round down says nothing of the ways."""
    straight = [10.0, 30.0, 12.0, 11.0]
    assert interval_of(straight, [1.25 * s for s in straight]) == pytest.approx((0.8, 0.8))
    low, high = interval_of(straight, [9.0, 33.0, 12.5, 10.0])
    assert low < 63 / 64.5 < high
