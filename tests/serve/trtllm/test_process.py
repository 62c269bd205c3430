"""The LLM API in a separate environment: another interpreter, another numpy, as good as nothing
of this project's.

The environment is a script that begins this interpreter with a stand-in of release 1.4.0rc1, which
wants numpy 2, with a numpy that says to be that, and without what such an environment may lack.
"""

import dataclasses
import subprocess
import sys

import psutil
import pytest

from serve.contract.config import Config, TranscriberConfig
from serve.contract.errors import ConfigError, DeviceError, UnavailableError
from serve.contract.messages import Request
from serve.contract.runtimes import TrtllmConfig
from serve.contract.server_config import ServerConfig
from serve.runtime.loader import open_runtime
from serve.speech.features import SAMPLE_RATE
from serve.supervisor.supervisor import free_ports, running_server
from serve.transcriber.loop import Transcriber
from serve.trtllm import llm_api
from serve.wire.client import TritonClient
from tests.fake_trtllm.install import HERE, OnThread, install_api, write_metadata
from tests.runtimes import TRTLLM, run, samples_job

LACKS = (
    "tritonclient",
    "starlette",
    "tomli_w",
    "serve.contract.codec",
    "serve.contract.config",
    "serve.contract.engine",
)
SITE = f"""
import sys

class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name in {LACKS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Lacks())
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """What the other environment has, besides torch and transformers, or seems to have."""
    folder = tmp_path_factory.mktemp("packages")
    needs = "Requires-Dist: torch>=2\nRequires-Dist: numpy<3.0.0,>=2.0.0\n"
    write_metadata(folder, "tensorrt-llm", "1.4.0rc1", needs)
    write_metadata(folder, "numpy", "2.4.1")
    (folder / "tensorrt_llm").symlink_to(HERE / "api" / "tensorrt_llm")
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


@pytest.fixture(scope="module")
def python(packages):
    """The interpreter of that environment."""
    return script(packages / "python", f'PYTHONPATH={packages} exec {sys.executable} "$@"')


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def settings(**trtllm):
    return dataclasses.replace(TRTLLM.runtime, tensorrt_llm=TrtllmConfig(**trtllm))


@pytest.fixture
def opened(engine, python):
    runtime = open_runtime(engine, settings(python=python))
    yield runtime
    runtime.close()


@pytest.fixture
def process(opened, packages):
    """The library's process, which the script began."""
    (found,) = [
        child
        for child in psutil.Process().children()
        if child.environ().get("PYTHONPATH") == str(packages)
    ]
    return found


@pytest.mark.nightly
def test_it_says_what_the_library_would_say_here(opened, process, engine, monkeypatch, caplog):
    made = samples_job(engine)
    jobs = [made(id, language=("en", "es")[id % 2]) for id in range(5)]
    found = run(opened, jobs)
    install_api(monkeypatch)
    here = open_runtime(engine, settings())
    expected = run(here, jobs)
    here.close()
    assert [found[job.id].result for job in jobs] == [expected[job.id].result for job in jobs]
    opened.close()
    assert not process.is_running()
    assert "is killed" not in caplog.text, "told to end, it did by itself"


@pytest.mark.nightly
def test_a_process_that_dies_ends_what_it_had_with_a_clear_error(opened, process, engine):
    opened.submit(samples_job(engine)(1, max_tokens=400))
    process.kill()
    words = "TensorRT-LLM failed: the TensorRT-LLM process ended with status -9; see its log"
    with pytest.raises(DeviceError, match=words):
        for _ in range(1000):
            opened.poll(0.05)
    with pytest.raises(DeviceError, match=words):
        opened.submit(samples_job(engine)(2))
    with pytest.raises(DeviceError, match=words):
        opened.gauges()  # which a transcriber asks for even where nothing is under way


@pytest.mark.parametrize(
    "text, words",
    [
        ("exit 3", "before it was ready, the TensorRT-LLM process ended with status 3; see"),
        ("exec sleep 60", r"did not start within 0\.2 s; see its log"),
    ],
)
def test_what_does_not_start_is_an_error_in_time(engine, tmp_path, monkeypatch, text, words):
    started, honest = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **b: started.append(honest(*a, **b)) or started[-1]
    )
    monkeypatch.setattr(llm_api, "START_TIMEOUT_S", 0.2 if "sleep" in text else 60.0)
    python = script(tmp_path / "python", text)
    with pytest.raises(UnavailableError, match=words):
        open_runtime(engine, settings(python=python))
    assert started[0].returncode is not None, "it is left running"


def test_an_interpreter_that_is_not_there_is_named(engine):
    with pytest.raises(UnavailableError, match=r"python = '/no/python' cannot be started: No such"):
        open_runtime(engine, settings(python="/no/python"))


def test_in_this_environment_its_numpy_is_missing(engine, packages, tmp_path, monkeypatch):
    """As release 1.4.0rc1 is, beside the numpy of tritonserver's stub."""
    for name in ("tensorrt_llm", "tensorrt_llm-1.4.0rc1.dist-info"):
        (tmp_path / name).symlink_to(packages / name)
    monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)  # another stand-in
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(llm_api, "spawn", OnThread)
    words = r"1\.4\.0rc1 needs numpy<3\.0\.0,>=2\.0\.0, but the environment of .*; set runtime"
    with pytest.raises(UnavailableError, match=words):
        open_runtime(engine, settings())


def test_it_sees_the_gpu_of_the_config_and_none_of_the_servers_libraries(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/triton:/own")
    monkeypatch.setenv("EARSHOT_LD_LIBRARY_PATH", "/own")
    seen = tmp_path / "seen"
    says = f'echo "$CUDA_VISIBLE_DEVICES $LD_LIBRARY_PATH" > {seen}'
    config = settings(python=script(tmp_path / "python", says))
    for device, gpus in (("cuda:1", "6"), ("cuda", "4,6")):
        with pytest.raises(UnavailableError, match="ended with status 0"):
            open_runtime(engine, dataclasses.replace(config, device=device))
        assert seen.read_text().split() == [gpus, "/own"]
    with pytest.raises(ConfigError, match="shows 2 GPUs; expected cuda:0 to cuda:1"):
        open_runtime(engine, dataclasses.replace(config, device="cuda:2"))


@pytest.mark.nightly
@pytest.mark.server
def test_a_real_server_has_it_decode(engine, python, monkeypatch):
    """Triton, its Python stub with numpy 1, and behind it the process that says to have numpy 2."""
    http, grpc, metrics = free_ports("127.0.0.1", 3)
    config = Config(
        engine=str(engine.path),
        runtime=settings(python=python),
        transcriber=TranscriberConfig(max_tokens=8, temperatures=(0.0,), vad="off"),
        server=ServerConfig(http_port=http, grpc_port=grpc, metrics_port=metrics),
    )
    made = samples_job(engine)(1, max_tokens=8)
    request = Request(
        made.features.numpy(), sample_rate=SAMPLE_RATE, language="en", timestamps=False
    )
    install_api(monkeypatch)
    here = open_runtime(engine, settings())
    with Transcriber(engine, here, config.transcriber) as transcriber:
        expected = transcriber.transcribe(request)
    with running_server(config) as server, TritonClient(server.grpc) as client:
        calls = [client.start(request) for _ in range(5)]
        found = [call.result() for call in calls]
    assert [transcript.tokens for transcript in found] == [expected.tokens] * 5
