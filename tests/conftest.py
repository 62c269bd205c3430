"""What tests share: the choice of GPU tests, a small engine, and one running server."""

import dataclasses
import fcntl
import functools
import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from build.clips import load_clips
from serve.contract.config import Config, RuntimeConfig, TranscriberConfig, load_config
from serve.contract.errors import MissingCheckpointError
from serve.contract.server_config import ServerConfig
from tests.programs import how_to_get, path_of

BASE = "configs/base.toml"
HUMAN = ("human/manifest.jsonl", "human/long.jsonl", "human-sharealike/manifest.jsonl")


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="run the tests marked gpu; fail without a GPU"
    )
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly, too")
    parser.addoption(
        "--require-programs",
        action="store_true",
        help="fail where a test's program, or the published checkpoint, is missing",
    )
    parser.addoption(
        "--bulk-files", type=int, default=40, metavar="N", help="that `serve bulk` is tested with"
    )


def pytest_configure(config):
    if config.getoption("--require-gpu"):
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--require-gpu: torch sees no CUDA device")
    # In the background shells have it ignored, and what tests Ctrl-C would wait in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that share the cores compute with one thread each, as do those that they start.
    if config.getoption("numprocesses", None):
        os.environ["OMP_NUM_THREADS"] = "1"


class _Scheduling(LoadFileScheduling):
    """Gives a file to one process, and all that use the fixture `server` to the same one."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "server" if _uses_server(file) else file


@functools.cache
def _uses_server(file):
    text = Path(file).read_text(encoding="utf-8")
    asked = re.search(
        r"^(?:def test_|@pytest.fixture.*\ndef )\w+\((?:[^)]*\W)?server\b", text, re.M
    )
    return bool(asked) and "\ndef server(" not in text


def pytest_xdist_make_scheduler(config, log):
    return _Scheduling(config, log)


def pytest_runtest_setup(item):
    missing = [mark.args[0] for mark in item.iter_markers("needs_program")]
    missing = [program for program in missing if path_of(program) is None]
    if missing:
        end = pytest.fail if item.config.getoption("--require-programs") else pytest.skip
        end("; ".join(map(how_to_get, missing)))


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "base_engine" in item.fixturenames:
            item.add_marker("published")
    left_out = set() if config.getoption("--require-gpu") else {"gpu"}
    if not config.getoption("--nightly"):
        left_out.add("nightly")
    chosen, deselected = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        (deselected if left_out & marks else chosen).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def ports_of_this_worker():
    """Each worker of a run chooses among its own ports: none takes one that another has chosen."""
    from serve.supervisor import supervisor

    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    supervisor._PORTS = supervisor._PORTS[number % 16 :: 16]


@pytest.fixture(scope="session")
def base_engine(pytestconfig):
    """Folder of configs/base.toml's engine, Whisper base in INT8, built unless it is up to date.

    Its tests skip, saying so, where the checkpoint cannot be had; --require-programs fails them.
    """
    folder = Path(load_config(BASE).engine)
    folder.parent.mkdir(exist_ok=True)
    # `make demo` compares it with its checkpoint, which takes longer than all that tests it.
    build = (*("-m", "build", "engine", "--config", BASE), "--if-stale", "--no-verify")
    with (folder.parent / ".base-for-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes run tests
        done = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=False)
    if done.returncode == MissingCheckpointError.exit_code:
        missing = pytestconfig.getoption("--require-programs")
        (pytest.fail if missing else pytest.skip)(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def human_clips():
    """Clips of people by file name, as the manifests in tests/data list them."""
    return {clip.file: clip for table in HUMAN for clip in load_clips(Path("tests/data") / table)}


@pytest.fixture(scope="session")
def nano_engine(tmp_path_factory):
    """Folder of an engine with random weights: what it says is nonsense, at once."""
    from build.checkpoint import open_checkpoint
    from tests.checkpoints import write_engine, write_nano

    folder = tmp_path_factory.mktemp("nano")
    checkpoint = open_checkpoint(str(write_nano(folder / "checkpoint")))
    return write_engine(checkpoint, folder / "engine").path


@pytest.fixture(scope="session")
def nano_config(nano_engine):
    """A small product on its own ports; call it for another one."""
    from serve.supervisor.supervisor import free_ports

    def make(**server):
        http, grpc, metrics = free_ports("127.0.0.1", 3)
        ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
        return Config(
            name="nano",
            engine=str(nano_engine),
            runtime=RuntimeConfig(slots=8, rows=12, threads=1),
            transcriber=TranscriberConfig(
                max_audio_s=120.0, max_pending=110, max_tokens=16, temperatures=(0.0,), vad="off"
            ),
            server=dataclasses.replace(ServerConfig(**ports), **server),
        )

    return make


@pytest.fixture(scope="session")
def server(nano_config, tmp_path_factory):
    """A real server, the same for all tests, which none may break."""
    from serve.supervisor.supervisor import running_server

    log, reasons = tmp_path_factory.mktemp("server") / "server.log", io.StringIO()
    handler = logging.StreamHandler(reasons)
    logging.getLogger("earshot").addHandler(handler)
    try:
        with running_server(nano_config(), log_path=log) as server:
            yield server
            if server.restarts:
                said = reasons.getvalue()[-4000:], log.read_text()[-4000:]
                pytest.fail("the server was started again: {}; its log: {}".format(*said))
    finally:
        logging.getLogger("earshot").removeHandler(handler)


@pytest.fixture(scope="session")
def client(server):
    from serve.wire.client import TritonClient

    with TritonClient(server.grpc, timeout_s=120) as client:
        yield client
