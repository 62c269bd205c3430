"""Triton as a child: what it needs, where it listens, how it fails."""

import contextlib
import dataclasses
import itertools
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from serve.contract.config import Config, RuntimeConfig, load_config
from serve.contract.errors import UnavailableError
from serve.contract.server_config import LiveConfig, ServerConfig, ShadowConfig
from serve.supervisor import server as server_module
from serve.supervisor.processes import live_children
from serve.supervisor.server import (
    TritonLaunch,
    TritonServer,
    cause,
    config_to_toml,
    prepare,
    write_repository,
)
from serve.supervisor.supervisor import prepare_reference
from serve.wire.client import TritonClient
from serve.wire.folder import (
    CONFIG,
    FAILURE,
    grpc_target,
    reference_folder,
    run_folder,
    shared_memory,
)
from serve.wire.tensors import INPUTS, OUTPUTS
from tests.serving import CLIP, ask_triton, audio_request
from tests.waits import WAIT_S, wait_until

BLOCK = 4096
START_S = 180.0


def machine_with(monkeypatch, free_mib):
    status = SimpleNamespace(f_bavail=free_mib * 2**20 // BLOCK, f_frsize=BLOCK)
    monkeypatch.setattr(server_module.os, "statvfs", lambda path: status)


def test_too_little_shared_memory_is_refused_with_what_to_do(tmp_path, monkeypatch):
    machine_with(monkeypatch, 64)  # a container's default
    config = Config(server=ServerConfig(max_inflight_mb=100))
    with pytest.raises(UnavailableError, match=r"has 64 MiB free.*expected 116.*--shm-size 116m"):
        prepare(tmp_path, config, "engines/none")
    machine_with(monkeypatch, 116)
    prepare(tmp_path, config, "engines/none")


def test_numpy_2_is_refused_before_anything_starts(tmp_path, monkeypatch):
    for version in ("2.0.1", "10.0"):
        monkeypatch.setattr("serve.wire.tensors.np.__version__", version)
        with pytest.raises(UnavailableError, match=f"numpy {version} is .*expected numpy 1"):
            prepare(tmp_path, Config(), "engines/none")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(UnavailableError, match="TMPDIR"):
        prepare(deep, Config(), "engines/none")


def test_a_config_survives_its_way_to_the_model(tmp_path):
    config = Config(name='a "b" \\ é', server=ServerConfig(host="0.0.0.0", drain_timeout_s=1e-5))
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


NOISE = 'E1122 02:25:21.826270 15168 server.cc:241] "CudaDriverHelper has not been initialized."'
LAST = 'I1122 02:25:22.000000 15168 server.cc:345] "Timeout 1: Found 2 live models"'
CAUSES = {
    "a model that cannot load": (
        "E1122 02:25:21.8 15 model_lifecycle.cc:642] \"failed to load 'whisper' version 1: "
        "Internal: ModuleNotFoundError: No module named 'torch'\"",
        "Internal: ModuleNotFoundError: No module named 'torch'",
    ),
    "a crash": ("Signal (11) received.", "it crashed with signal 11"),
    "another error": ('E1122 02:25:21.8 15 main.cc:5] "no more files"', '"no more files"'),
    "an option": ("Failed to parse --x", "Failed to parse --x"),
    "nothing": ("", None),
}


@pytest.mark.parametrize("line, told", CAUSES.values(), ids=CAUSES)
def test_a_log_gives_its_cause_and_not_its_noise(line, told):
    assert cause([NOISE, line, LAST]) == told


def test_a_failure_counts_though_it_could_not_be_written_down(tmp_path):
    """As where the disk is full."""
    launch = TritonLaunch(tmp_path, Config(), tmp_path, ("/bin/sleep", "600"), dict(os.environ))
    triton = TritonServer(launch, tmp_path / "log")
    failure = tmp_path / FAILURE
    failure.touch()
    assert triton.failure() is None  # it may be writing
    later = time.time() + 3600  # the clock was set back meanwhile
    for then in (0, later):
        os.utime(failure, (then, then))
        assert "see its log" in triton.failure()
    failure.write_text("the device failed")
    assert triton.failure() == "the device failed"
    triton.kill()


@pytest.fixture
def run():
    with run_folder() as folder:  # the path is short enough for sockets
        yield folder


def test_the_reference_of_a_gpu_runs_on_the_processor_with_nothing_of_the_gpus(run, nano_engine):
    shadow = ShadowConfig(share=0.1, engine=str(nano_engine))
    fast = RuntimeConfig(
        device="cuda", slots=64, kernels="triton", cuda_graph=True, encoder_precision="fp8"
    )
    config = Config(runtime=fast, shadow=shadow, live=LiveConfig(short_encoder="on"))
    launch = prepare_reference(run, config)
    written = load_config(reference_folder(run) / CONFIG)
    assert launch.folder == reference_folder(run)
    assert written.runtime == RuntimeConfig(
        device="cpu",
        compute_type="float32",
        encoder_precision="full",
        slots=4,
        rows=32,
        encoder_batch=1,
        memory_share=0.2,
    )
    assert written.live.short_encoder == "auto"
    of_gpu = dataclasses.replace(shadow, device="cuda:1")
    other = run / "o"
    other.mkdir()
    prepare_reference(other, dataclasses.replace(config, shadow=of_gpu))
    on_gpu = load_config(reference_folder(other) / CONFIG).runtime
    assert (on_gpu.device, on_gpu.cuda_graph) == ("cuda:1", True)


def test_without_an_engine_of_its_own_there_is_none(run):
    for shadow in (ShadowConfig(engine="engines/demo"), ShadowConfig(share=0.1, beam_size=8)):
        assert prepare_reference(run, Config(shadow=shadow)) is None


# ---------------------------------------------------------------- the model repository


def test_the_model_repository_names_the_run_and_links_this_code(tmp_path, monkeypatch):
    """Names are escaped, and the engine's path is absolute: the model runs in another folder."""
    folder = tmp_path / 'a "run" \\ é'
    folder.mkdir()
    monkeypatch.chdir(folder)
    repository = write_repository(folder, folder / "some.toml", Path("engine"))
    assert [path.name for path in repository.iterdir()] == ["whisper"]
    text = (repository / "whisper" / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "config": str(folder / "some.toml"),
        "engine": str(folder / "engine"),
        "folder": str(folder),
    }
    assert [item.name for item in config.input] == list(INPUTS)
    assert [item.name for item in config.output] == list(OUTPUTS)
    code = repository / "whisper" / "1"
    assert "class TritonPythonModel" in (code / "model.py").read_text(encoding="utf-8")
    assert (code / "serve" / "wire" / "tensors.py").is_file()


# ---------------------------------------------------------------- a real one


@pytest.fixture(scope="module")
def alone(nano_config):
    """Starts Triton without a gateway; gives its folder and itself."""

    @contextlib.contextmanager
    def start(**options):
        with run_folder() as folder:
            config = nano_config(**options)
            triton = TritonServer(prepare(folder, config, config.engine), folder / "log")
            try:
                wait_until(lambda: triton.failure() or triton.ready(), "not ready", START_S)
                assert triton.failure() is None, (folder / "log").read_text()
                yield folder, triton
            finally:
                triton.kill()

    return start


@pytest.fixture(scope="module")
def running(alone):
    with alone() as found:
        yield found


@pytest.mark.server
def test_nobody_else_can_reach_it_or_read_what_it_was_sent(running):
    folder, triton = running
    listening = [c for c in psutil.Process(triton.pid).net_connections() if c.status == "LISTEN"]
    assert not listening
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    regions = shared_memory(folder)
    assert regions
    for path in (*regions, *folder.glob("*.sock*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.server
def test_calls_that_change_or_reveal_it_are_locked(running):
    folder, _ = running
    locked = {
        "SystemSharedMemoryStatus": service_pb2.SystemSharedMemoryStatusRequest(),
        "SystemSharedMemoryRegister": service_pb2.SystemSharedMemoryRegisterRequest(
            name="mine", key=shared_memory(folder)[0].name, byte_size=64
        ),
        "CudaSharedMemoryStatus": service_pb2.CudaSharedMemoryStatusRequest(),
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
        "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="whisper"),
        "ModelConfig": service_pb2.ModelConfigRequest(name="whisper"),
        "ModelStatistics": service_pb2.ModelStatisticsRequest(),
        "TraceSetting": service_pb2.TraceSettingRequest(),
        "LogSettings": service_pb2.LogSettingsRequest(),
    }
    with grpc.insecure_channel(grpc_target(folder)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, request in locked.items():
            with pytest.raises(grpc.RpcError) as refused:
                getattr(stub, name)(request, timeout=WAIT_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, name
            assert "protocol is restricted" in refused.value.details()
    with TritonClient(grpc_target(folder)) as client, asking(folder) as ask:
        assert client.ready() and not ask().error_message


@contextlib.contextmanager
def asking(folder):
    """Gives what asks the Triton of this folder itself; that gives its only answer."""
    numbers = itertools.count()
    with grpc.insecure_channel(grpc_target(folder)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(audio=CLIP):
            (answer,) = ask_triton(stub, audio_request(audio, f"test-{next(numbers)}"))
            return answer

        yield ask


def model_of(triton):
    """The model's process, the only one below Triton's."""
    (pid,) = live_children(triton.pid)
    return pid


@pytest.mark.server
def test_a_model_that_stands_still_is_not_ready_and_ready_again(running):
    folder, triton = running
    pid = model_of(triton)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: not triton.ready(), "a process that stands still counts as ready")
        assert triton.failure() is None, "there is time: it may go on"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(triton.ready, "not ready again")
    with asking(folder) as ask:
        assert not ask().error_message
    assert triton.failure() is None


@pytest.mark.nightly
@pytest.mark.server
def test_a_model_that_stands_still_too_long_has_failed(alone):
    with alone(stall_timeout_s=4.0) as (_, triton):
        os.kill(model_of(triton), signal.SIGSTOP)
        wait_until(triton.failure, "nobody noticed")
        assert (
            "had no heartbeat for 4 s; the maximum is server.stall_timeout_s = 4"
            in triton.failure()
        )


@pytest.mark.nightly
@pytest.mark.server
def test_requests_that_triton_gave_up_in_a_stall_are_a_failure(alone):
    """The model would answer them once it goes on, and Triton dies of such an answer."""
    with alone() as (folder, triton), asking(folder) as ask:
        assert not ask().error_message
        assert ask(b"").error_message.startswith("AudioError")  # a refusal is none of them
        os.kill(model_of(triton), signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(ask)
            wait_until(triton.failure, "nobody noticed")
            assert "Triton abandoned requests" in triton.failure()
            assert "not healthy" in call.result().error_message
