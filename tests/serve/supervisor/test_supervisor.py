"""The whole server: how it starts, what it survives, how it fails, and how it ends."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from serve.contract.errors import (
    AudioError,
    DeadlineError,
    EarshotError,
    OverloadedError,
    UnavailableError,
)
from serve.contract.messages import Request, RequestFinished
from serve.contract.server_config import ShadowConfig
from serve.supervisor import supervisor as run_module
from serve.supervisor.processes import is_alive, live_children
from serve.supervisor.server import config_to_toml
from serve.supervisor.supervisor import free_ports, running_server
from serve.wire.client import TritonClient
from serve.wire.folder import reference_folder, shared_memory
from tests.marks import nightly
from tests.serving import CLIP, LONG, accepted, audio_file, is_ready, metrics_page, triton_pids
from tests.waits import wait_until

pytestmark = pytest.mark.server
START_S = 180.0


def gateway_of(server):
    """The gateway's process."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it is a zombie
            if {"serve.gateway", str(server.folder)} <= set(child.cmdline()):
                return child.pid
    raise AssertionError("the gateway's process is not there")


def whisper_of(server, engine=0):
    """The process that has an engine."""
    (pid,) = live_children(triton_pids(server)[engine])
    return pid


# ---------------------------------------------------------------- one life: exchange, death, end


@pytest.fixture(scope="module")
def config(nano_config):
    return nano_config()


@pytest.fixture(scope="module")
def survivor(config):
    with running_server(config) as server:
        yield server


def restarts(server):
    """By part, as the metrics page has them."""
    page = metrics_page(server)
    found = re.findall(r'^earshot_restarts_total\{part="(\w+)".*\} (\d+)', page, re.MULTILINE)
    return {name: int(value) for name, value in found}


def comes_back(server):
    wait_until(lambda: is_ready(server.http), "it did not come back", START_S)
    with TritonClient(server.grpc, timeout_s=120) as client:
        assert client.transcribe(CLIP).duration == 1.0
        assert isinstance(list(client.stream(Request(audio=CLIP)))[-1], RequestFinished)
    assert server.failure() is None


def error_of(call):
    try:
        call.result()
    except EarshotError as error:
        return type(error)
    return None


def test_requests_meet_an_exchange_and_are_answered(survivor, config, another, exchange, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(another)
    pids = triton_pids(survivor)
    with TritonClient(survivor.grpc, timeout_s=120) as client, ThreadPoolExecutor(1) as pool:
        call = client.start(Request(audio=LONG))
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
    assert triton_pids(survivor) != pids and survivor.restarts == 0


def test_a_model_that_dies_is_started_again(survivor, caplog):
    before, requests = restarts(survivor), accepted(survivor)
    with TritonClient(survivor.grpc, timeout_s=120) as client:
        request = Request(audio=audio_file(119.0))
        calls = [client.start(request) for _ in range(20)]
        wait_until(lambda: accepted(survivor) > requests + 5, "no request arrived")
        os.kill(whisper_of(survivor), signal.SIGKILL)
        assert {error_of(call) for call in calls} <= {UnavailableError, None}
        wait_until(lambda: not is_ready(survivor.http), "ready without a model")
        with pytest.raises(UnavailableError):
            client.transcribe(CLIP)
    comes_back(survivor)
    assert restarts(survivor) == {**before, "server": before["server"] + 1}
    assert "a model's process ended" in caplog.text and "restarts in" in caplog.text
    assert survivor.restarts == 1


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [4.0, 10.0])
def test_a_stall_ends_every_request_and_the_server_comes_back(survivor, seconds):
    """Triton 24.10 gives a model that stands still one second, which no option changes."""
    triton = triton_pids(survivor)
    whisper = whisper_of(survivor)
    with TritonClient(survivor.grpc, timeout_s=120) as client:
        os.kill(whisper, signal.SIGSTOP)
        calls = [client.start(Request(audio=CLIP)) for _ in range(20)]
        wait_until(lambda: not is_ready(survivor.http), "ready while the model stands still")
        # What the watcher has not ended by then goes on.
        psutil.wait_procs([psutil.Process(whisper)], timeout=seconds)
        if is_alive(whisper):
            os.kill(whisper, signal.SIGCONT)
        assert {error_of(call) for call in calls} <= {UnavailableError, None}
    comes_back(survivor)
    assert triton_pids(survivor) != triton


def test_the_end_answers_what_was_accepted_and_leaves_nothing(survivor):
    """The last that has the survivor."""
    (triton,) = triton_pids(survivor)
    family = [triton, *live_children(triton), gateway_of(survivor)]
    assert len(family) == 3 and all(map(is_alive, family))
    with TritonClient(survivor.grpc, timeout_s=120) as client:
        assert client.ready() and survivor.failure() is None
        requests = accepted(survivor)
        call = client.start(Request(audio=LONG))
        wait_until(lambda: accepted(survivor) > requests, "not accepted")
        survivor.stop()
        assert call.result().duration == 75.0
    assert not is_ready(survivor.http)
    wait_until(lambda: not any(map(is_alive, family)), "they stayed")
    assert not shared_memory(survivor.folder)


# ---------------------------------------------------------------- starts that fail


def never(config, *arguments):
    with running_server(config, *arguments):
        raise AssertionError("the server started")


@pytest.mark.parametrize("checked", [True, *nightly(False)], ids=["before", "meanwhile"])
def test_a_port_in_use_is_named(nano_config, monkeypatch, checked):
    if not checked:
        monkeypatch.setattr(run_module, "check_ports", lambda server: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EarshotError, match=rf"127\.0\.0\.1:{port}.*server\.grpc_port") as one:
            never(nano_config(grpc_port=port))
    assert len(str(one.value).splitlines()) == 1


# ---------------------------------------------------------------- ends


@pytest.mark.nightly
def test_no_process_outlives_a_parent_that_is_killed(nano_config, tmp_path):
    toml = tmp_path / "nano.toml"
    toml.write_text(config_to_toml(nano_config()), encoding="utf-8")
    with tempfile.TemporaryDirectory() as left:
        parent = subprocess.Popen(
            [sys.executable, "-m", "serve", "start", "--config", str(toml)],
            env={**os.environ, "TMPDIR": left},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with parent:
            try:
                assert parent.stdout.readline().startswith(b"ready: ")
                children = psutil.Process(parent.pid).children(recursive=True)
                family = [child.pid for child in children]
                # Triton, its model, the gateway, and who decodes audio with or without a spare.
                assert len(family) in (4, 5) and all(map(is_alive, family))
            finally:
                parent.kill()
        wait_until(lambda: not any(map(is_alive, family)), family)
        (folder,) = Path(left).iterdir()
        assert shared_memory(folder), "it could not end as it should"
        again = subprocess.run(
            [sys.executable, "-m", "serve", "start", "--config", str(toml), "--engine", "/none"],
            env={**os.environ, "TMPDIR": left},
            stderr=subprocess.DEVNULL,
            timeout=START_S,
        )
        assert again.returncode == 1
        assert not list(Path(left).iterdir()) and not shared_memory(folder)


@pytest.mark.nightly
def test_streams_cancelled_as_they_end_do_not_keep_it_from_stopping(nano_config):
    config = nano_config(drain_timeout_s=2 * START_S)
    with running_server(config) as server, TritonClient(server.grpc, timeout_s=120) as client:
        for _ in range(30):
            events = client.stream(Request(audio=CLIP))
            next(events)  # the rest is on its way
            events.close()
        server.stop()
        log = server.log_path.read_text()
    assert "stopped; all was answered" in log


@pytest.mark.nightly
def test_what_the_drain_could_not_answer_is_said(nano_config):
    with (
        pytest.raises(DeadlineError, match="not answered before the server stopped"),
        running_server(nano_config(drain_timeout_s=0.05)) as server,
        TritonClient(server.grpc, timeout_s=120) as client,
    ):
        before = accepted(server)
        request = Request(audio=audio_file(119.0))
        calls = [client.start(request) for _ in range(30)]
        wait_until(lambda: accepted(server) > before + 5, "no request arrived")
        server.stop()
    assert OverloadedError in {error_of(call) for call in calls}, "told to try again"


def test_free_ports_are_different():
    assert len(set(free_ports("127.0.0.1", 20))) == 20


@pytest.mark.nightly
def test_answers_are_compared_with_an_engine_of_its_own_which_may_die(nano_config, nano_engine):
    shadow = ShadowConfig(share=1.0, engine=str(nano_engine))
    config = dataclasses.replace(nano_config(), shadow=shadow)

    def compared(count):
        line = rf"^earshot_shadow_compared_total{{.*}} {count}\.0$"
        return lambda: re.search(line, metrics_page(server), re.MULTILINE)

    with running_server(config) as server, TritonClient(server.grpc, timeout_s=60) as client:
        client.transcribe(CLIP, language="en")
        wait_until(compared(1), "a comparison")
        assert 'earshot_shadow_cer{language="all"} 0.0' in metrics_page(server)
        folder = str(reference_folder(server.folder))
        (reference,) = [
            process
            for process in psutil.Process().children()
            if "tritonserver" in process.name()
            and any(folder in word for word in process.cmdline())
        ]
        reference.kill()
        client.transcribe(CLIP, language="en")
        wait_until(compared(2), "one by the reference that was started again", 120)
        assert server.restarts == 1
