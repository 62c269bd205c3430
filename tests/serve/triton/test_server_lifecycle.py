"""The real server: how it starts, how it fails to, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve.config import Config, ServerConfig, load_config
from serve.errors import EarshotError, UnavailableError
from serve.messages import Request
from serve.triton import server as server_module
from serve.triton import wire
from serve.triton.client import Client
from serve.triton.processes import is_alive, live_children
from serve.triton.server import (
    config_to_toml,
    free_ports,
    is_ready,
    running_server,
)
from tests.serving import LONG, WAIT_S, outcomes, wait_until

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[3]


def test_readiness_and_a_clean_end(nano_config):
    config = nano_config()
    with running_server(config) as server:
        assert is_ready(server.http) and server.failure() is None
        children = live_children(server.pid)
        assert len(children) == 2
        folder = server.folder
        with Client(server.grpc) as client:
            assert client.ready()
            call = client.start(Request(audio=LONG))
            wait_until(lambda: outcomes(server)["pending"] or answered(server), "not accepted")
    assert call.result().duration == 75.0  # accepted before the end, so answered
    assert not is_ready(server.http)
    assert not any(is_alive(pid) for pid in (server.pid, *children))
    assert not folder.exists()
    assert not list(Path("/dev/shm").glob(f"{folder.name}*"))


def test_ready_means_that_the_metrics_answer_too(monkeypatch):
    """Triton opens that port last; who read them at once was sometimes turned away."""
    monkeypatch.setattr(server_module, "is_ready", lambda http: True)
    (port,) = free_ports("127.0.0.1", 1)
    starting = SimpleNamespace(
        http="", metrics=f"127.0.0.1:{port}", startup_failure=lambda: None, log_path=Path(__file__)
    )
    with pytest.raises(EarshotError, match=r"not ready within 0\.01 s"):
        server_module._wait_until_ready(starting, 0.01)
    with socket.create_server(("127.0.0.1", port)):
        server_module._wait_until_ready(starting, WAIT_S)


def answered(server):
    return outcomes(server)["ok"] > 1  # the warm-up is one


def test_no_process_outlives_a_parent_that_is_killed(nano_config, tmp_path):
    config = nano_config(drain_timeout_s=5.0)
    toml = tmp_path / "nano.toml"
    toml.write_text(config_to_toml(config), encoding="utf-8")
    with tempfile.TemporaryDirectory() as left:  # nobody removes what a killed parent made
        parent = subprocess.Popen(
            [sys.executable, "-m", "serve", "triton", "--config", str(toml)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": left},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with parent:
            assert parent.stdout.readline().startswith(b"ready: ")
            (server_pid,) = live_children(parent.pid)
            family = [server_pid, *live_children(server_pid)]
            assert len(family) == 3 and all(map(is_alive, family))
            parent.kill()
        wait_until(lambda: not any(map(is_alive, family)), family)
        (folder,) = Path(left).iterdir()
        assert not list(Path("/dev/shm").glob(f"{folder.name}*"))


def test_a_path_too_long_for_a_socket_is_refused(nano_config, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(UnavailableError, match="TMPDIR"), running_server(nano_config()):
        raise AssertionError("the server started")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_model_that_dies_is_noticed(nano_config, number):
    with pytest.raises(EarshotError, match="process ended"), running_server(nano_config()) as one:
        os.kill(live_children(one.pid)[0], number)
        wait_until(one.failure, "nobody noticed")
        raise EarshotError(one.failure())
    assert not is_alive(one.pid)


def test_a_missing_engine_is_said_in_one_sentence(nano_config, tmp_path):
    with (
        pytest.raises(EarshotError, match=rf"no engine at {tmp_path}/none .*build one with"),
        running_server(nano_config(), str(tmp_path / "none")),
    ):
        raise AssertionError("the server started")


def test_a_port_in_use_is_named(nano_config):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = nano_config(grpc_port=port)
        with (
            pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{port}: .*server\.grpc_port"),
            running_server(config),
        ):
            raise AssertionError("the server started")


def test_a_config_survives_its_way_to_the_model(tmp_path):
    config = Config(name='a "b" \\ é', server=ServerConfig(host="0.0.0.0", drain_timeout_s=1e-5))
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_free_ports_are_different():
    assert len(set(free_ports("127.0.0.1", 20))) == 20


def test_the_model_configuration_lists_the_wire(server):
    for name in (wire.MODEL, wire.STREAM_MODEL):
        with urllib.request.urlopen(f"http://{server.http}/v2/models/{name}", timeout=10) as page:
            model = json.load(page)
        datatypes = {spec.name: spec.datatype for spec in wire.INPUTS.values()}
        assert {i["name"]: i["datatype"] for i in model["inputs"]} == datatypes
        assert [o["name"] for o in model["outputs"]] == list(wire.OUTPUTS)
