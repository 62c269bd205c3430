"""What a run's Tritons are started with."""

import dataclasses
import re

import psutil
import pytest

from serve.contract.config import Config, RuntimeConfig, load_config
from serve.contract.server_config import LiveConfig, ShadowConfig
from serve.supervisor.supervisor import prepare_reference, running_server
from serve.wire.client import TritonClient
from serve.wire.folder import CONFIG, reference_folder, run_folder
from tests.serving import CLIP, metrics_page, wait_until


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


@pytest.mark.nightly
@pytest.mark.server
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
