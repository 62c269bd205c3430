"""A server with several engines: who gets what, and what becomes of the rest where one dies."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from serve.contract.errors import EarshotError, UnavailableError
from serve.contract.messages import Request, RequestFinished
from serve.supervisor.supervisor import running_server
from tests.serving import CLIP, LONG, audio_file, is_ready, metrics_page, triton_pids
from tests.waits import WAIT_S, wait_until

pytestmark = [pytest.mark.server, pytest.mark.nightly]
DEVICES = ["cpu-0", "cpu-1"]


@pytest.fixture(scope="module")
def server(nano_config):
    config = nano_config(drain_timeout_s=10 * WAIT_S)  # of 32 minutes of audio, on a busy machine
    transcriber = dataclasses.replace(config.transcriber, max_audio_s=500.0)
    runtime = dataclasses.replace(config.runtime, device="cpu,cpu")
    config = dataclasses.replace(config, runtime=runtime, transcriber=transcriber)
    with running_server(config) as server:
        yield server


def counts(server, name):
    """A metric by device."""
    pattern = rf'^earshot_{name}{{.*device="([\w-]+)".*}} (\d+)'
    found = re.findall(pattern, metrics_page(server), re.MULTILINE)
    return {device: int(value) for device, value in found}


def health(server):
    with urllib.request.urlopen(f"http://{server.http}/health", timeout=WAIT_S) as answer:
        return json.load(answer)


def ending(wait, one):
    """What a call or a stream ended with, or the error's kind."""
    try:
        return wait(one)
    except EarshotError as error:
        return type(error)


def durations(calls):
    return {ending(lambda call: call.result().duration, call) for call in calls}


def engine_of(server, number):
    """The process that has an engine."""
    (pid,) = [
        child.pid
        for child in psutil.Process(triton_pids(server)[number]).children()
        if "whisper_0_0" in child.cmdline()
    ]
    return pid


def test_each_keeps_to_its_own_cores(server):
    own = [set(psutil.Process(engine_of(server, number)).cpu_affinity()) for number in (0, 1)]
    whole = set(psutil.Process().cpu_affinity())
    if len(whole) > 1:
        assert not own[0] & own[1] and own[0] | own[1] == whole
    else:
        assert own == [whole] * 2


def test_requests_spread_over_the_engines(server, client):
    before = counts(server, "accepted_total")
    assert list(before) == DEVICES
    assert durations([client.start(Request(audio=LONG)) for _ in range(8)]) == {75}
    wait_until(
        lambda: sum(counts(server, "accepted_total").values()) >= sum(before.values()) + 8,
        "they are not counted",
    )
    after = counts(server, "accepted_total")
    assert all(after[device] > before[device] for device in DEVICES)
    assert health(server) == {"status": "ok", "engines": dict.fromkeys(DEVICES, True)}


def test_one_that_dies_is_avoided_and_comes_back(server, client):
    before = counts(server, "restarts_total")
    # So long that none has ended once all have begun.
    long = Request(audio=audio_file(480.0, "MP3"))
    streams = [client.stream(long) for _ in range(4)]
    with contextlib.ExitStack() as stack:
        short = Request(audio=audio_file(119.0))
        calls = [client.start(short) for _ in range(10)]
        for stream in streams:
            stack.callback(stream.close)
        with ThreadPoolExecutor(len(streams)) as pool:
            list(pool.map(next, streams))  # they have begun
        os.kill(engine_of(server, 1), signal.SIGKILL)
        wait_until(lambda: not health(server)["engines"]["cpu-1"], "it is not missed")
        assert is_ready(server.http)
        assert client.transcribe(CLIP).duration == 1.0
        # What has not begun to answer the other engine answers.
        assert durations(calls) <= {119.0, UnavailableError}
        ends = [ending(lambda one: type(list(one)[-1]), stream) for stream in streams]
    assert {RequestFinished, UnavailableError} == set(ends)
    wait_until(lambda: all(health(server)["engines"].values()), "it did not come back", 120.0)
    both = dict.fromkeys(DEVICES, 1)
    wait_until(lambda: counts(server, "engine_up") == both, "the supervisor does not see it")
    restarts = counts(server, "restarts_total")
    assert restarts == {**before, "cpu-1": before["cpu-1"] + 1}
    assert server.failure() is None


def test_the_end_waits_for_what_either_has_accepted(server, client):
    before = counts(server, "accepted_total")
    request = Request(audio=audio_file(119.0))
    calls = [client.start(request) for _ in range(16)]
    wait_until(
        lambda: all(counts(server, "accepted_total")[name] > before[name] for name in DEVICES),
        "none arrived",
    )
    pids = (*triton_pids(server), engine_of(server, 0), engine_of(server, 1))
    family = [psutil.Process(pid) for pid in pids]
    server.stop()
    assert durations(calls) == {119.0}
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert not is_ready(server.http)
