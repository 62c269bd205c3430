"""The supervisor's look at a gateway: by its own door, and at whether it goes on."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket

import pytest

from serve.contract.config import Config
from serve.contract.server_config import GatewayConfig, ServerConfig
from serve.supervisor.gateway import GatewayProcess
from serve.supervisor.server import config_to_toml
from serve.supervisor.supervisor import free_ports
from serve.wire.folder import CONFIG, engine_links
from tests.waits import WAIT_S, wait_until

STALL_S = 3.0
MOST = 8 + 256


@pytest.fixture
def config():
    http, rpc, metrics = free_ports("127.0.0.1", 3)
    server = ServerConfig(
        http_port=http, grpc_port=rpc, metrics_port=metrics, max_inflight=8, stall_timeout_s=STALL_S
    )
    return dataclasses.replace(Config(), server=server)


@pytest.fixture
def start(config, tmp_path):
    """Start a gateway, with other arguments of `GatewayProcess`, and wait until it is ready."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, config=config):
            (tmp_path / CONFIG).write_text(config_to_toml(config))
            for link in engine_links(tmp_path, 1):
                link.mkdir(exist_ok=True)
            gateway = GatewayProcess(tmp_path, config.server, tmp_path / "log", *arguments)
            stack.callback(gateway.kill)
            wait_until(gateway.ready, "it never began")
            return gateway

        yield start


@pytest.fixture
def gateway(start):
    return start()


def test_a_crowd_at_its_doors_is_no_reason_to_end_it(gateway, config):
    with contextlib.ExitStack() as stack:
        for port in (config.server.http_port, config.server.metrics_port):
            for _ in range(MOST + 50):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        for _ in range(20):
            wait_until(gateway.ready, "its own door is closed")
            assert gateway.failure() is None


@pytest.mark.nightly
def test_one_that_stands_still_has_failed_and_one_that_goes_on_again_has_not(gateway):
    pid = gateway.pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: gateway.failure() is not None, "it has not failed")
    assert "its event loop was blocked for" in gateway.failure()
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: gateway.failure() is None, "it is given up")
    wait_until(gateway.ready, "it does not answer")


def test_lines_of_requests_go_where_they_are_wanted(start, config, tmp_path):
    read, write = os.pipe()
    gateway = start(write, config=dataclasses.replace(config, gateway=GatewayConfig(log="json")))
    os.close(write)
    connection = http.client.HTTPConnection("127.0.0.1", config.server.http_port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/nothing")
        id = connection.getresponse().headers["x-request-id"]
    gateway.drain()
    with open(read, encoding="utf-8") as lines:
        (found,) = map(json.loads, lines)
    assert (found["id"], found["route"], found["outcome"]) == (id, "/nothing", "not found")
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert told[-1]["message"] == "stopped; all was answered"
