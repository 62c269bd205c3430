"""A failed exchange and an unloaded engine on a real server; no request is lost."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.contract.errors import EarshotError
from serve.supervisor.supervisor import running_server
from tests.serving import CLIP, metrics_page, triton_pids
from tests.waits import wait_until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def config(nano_config):
    return nano_config(idle_unload_s=2.0)


@pytest.fixture(scope="module")
def server(config):
    with running_server(config) as server:
        yield server


def loaded(server):
    return re.search(r"^earshot_engine_loaded{.*} (\d)", metrics_page(server), re.M)[1] == "1"


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
    assert loaded(server) and len(triton_pids(server)) == 1
