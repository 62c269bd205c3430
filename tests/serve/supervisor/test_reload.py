"""Engines of a real server are exchanged and unloaded, and no request is lost."""

import dataclasses
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.contract.errors import AudioError, EarshotError
from serve.contract.messages import Request
from serve.supervisor.control import give, order_for
from serve.supervisor.supervisor import running_server
from serve.wire.client import TritonClient
from tests.serving import CLIP, LONG, audio_file, metrics_page, wait_until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """A manifest of clips without texts: the engine before says what is right."""
    folder = tmp_path_factory.mktemp("clips")
    for seed in range(3):
        (folder / f"{seed}.flac").write_bytes(audio_file(2.0, seed=seed))
    lines = [json.dumps({"file": f"{seed}.flac"}) for seed in range(3)]
    (folder / "clips.jsonl").write_text("\n".join(lines))
    return str(folder / "clips.jsonl")


@pytest.fixture(scope="module")
def config(nano_config):
    return nano_config(idle_unload_s=2.0)


@pytest.fixture(scope="module")
def server(config):
    with running_server(config) as server:
        yield server


@pytest.fixture
def client(server):
    with TritonClient(server.grpc, timeout_s=120) as client:
        yield client


@pytest.fixture
def another(nano_engine, tmp_path):
    return shutil.copytree(nano_engine, tmp_path / "another")


def loaded(server):
    return re.search(r"^earshot_engine_loaded{.*} (\d)", metrics_page(server), re.M)[1] == "1"


@pytest.fixture
def exchange(clips):
    def exchange(config, engine, **options):
        said = []
        give(order_for(config, str(engine), clips, **options), said.append)
        return said

    return exchange


def test_requests_meet_an_exchange_and_are_answered(
    server, client, config, another, exchange, tmp_path
):
    link = tmp_path / "current"
    link.symlink_to(another)
    call, pids = client.start(Request(audio=LONG)), server.pids
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(exchange, dataclasses.replace(config, engine=str(link)), "")
        while not asked.done():
            assert client.transcribe(CLIP).duration == 1.0
            with pytest.raises(AudioError):
                client.transcribe(b"RIFF" + bytes(1000))
            leaving = client.stream(Request(audio=LONG))
            next(leaving)
            leaving.close()
    assert call.result().duration == 75.0
    assert asked.result()[-1] == f"the engine is now {link}"
    assert "CER 0.0 % on 3 clips" in " ".join(asked.result())
    assert server.pids != pids and server.restarts == 0


@pytest.mark.nightly
def test_a_damaged_engine_changes_nothing_though_the_old_one_had_to_end(
    server, client, config, another, exchange
):
    weights = another / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(EarshotError, match=r"was rejected: .*fails its SHA-256"):
        exchange(config, another, in_place=True)
    assert client.transcribe(CLIP).duration == 1.0
    assert 'earshot_reloads_total{outcome="failed"} 1' in metrics_page(server)


@pytest.mark.nightly
def test_what_nobody_uses_is_unloaded_and_comes_back_once_for_all_who_ask(server, client):
    wait_until(lambda: not loaded(server), "it is still there")
    assert client.ready() and not server.restarts
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(client.transcribe, CLIP) for _ in range(4)]
        assert [call.result().duration for call in calls] == [1.0] * 4
    assert loaded(server) and len(server.pids) == 1
