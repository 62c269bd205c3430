"""Commands, version checks, limits and atomicity of a TensorRT-LLM build, on the stand-in."""

import dataclasses
import json
from types import SimpleNamespace

import psutil
import pytest
import torch

from build.builders import up_to_date
from build.config import BuildConfig, BuildProduct, load_config
from build.trtllm import engines as trtllm_build
from build.trtllm.engines import check, commands_for, planned_limits
from serve.contract.config import RuntimeConfig
from serve.contract.engine import MEL_FILTERS_FILE, open_engine
from serve.contract.errors import ConfigError, EngineError, UnavailableError
from serve.contract.manifest import MANIFEST_FILE
from serve.contract.runtimes import TrtllmConfig
from serve.trtllm.limits import limits_of
from tests.fake_trtllm.install import (
    HERE,
    compile_engine,
    dims_of,
    install,
    make_config,
    write_metadata,
)

HOPPER = SimpleNamespace(name="H", major=9, minor=0)


def commands(dims, config):
    """The commands of both builder runs."""
    limits = planned_limits(dims, config, "1.2", HOPPER)
    return list(commands_for(dims, limits, config.runtime.device).values())


def parse(monkeypatch, words):
    """Parse a command with the documented flags; anything else is a usage error."""
    monkeypatch.syspath_prepend(str(HERE))
    import trtllm_build as stand_in

    return stand_in.make_parser().parse_args(words)


@pytest.mark.parametrize("size", ["tiny", "large-v3", "large-v3-turbo"])
def test_commands_use_documented_flags_and_computed_lengths(monkeypatch, size):
    runtime = RuntimeConfig(slots=64, encoder_batch=16, tensorrt_llm=TrtllmConfig(beam_width=3))
    lines = commands(dims_of(size), BuildProduct(runtime=runtime))
    assert [line[0] for line in lines] == ["trtllm-build", "trtllm-build"]
    encoder, decoder = (parse(monkeypatch, line[1:]) for line in lines)

    assert encoder.checkpoint_dir == "checkpoint/encoder"
    assert encoder.output_dir == "../tensorrt_llm/encoder"
    assert (encoder.max_input_len, encoder.max_seq_len) == (3000, 3000)  # mel frames
    assert encoder.max_num_tokens == 1500 * 16
    assert encoder.max_batch_size == decoder.max_batch_size == 64
    assert (encoder.gemm_plugin, encoder.moe_plugin) == ("disable", "disable")
    assert encoder.bert_attention_plugin == decoder.bert_attention_plugin == "float16"
    assert encoder.remove_input_padding == decoder.remove_input_padding == "enable"

    assert decoder.max_encoder_input_len == 3000
    assert (decoder.max_input_len, decoder.max_seq_len) == (228, 448)
    assert decoder.max_beam_width == 3
    assert (decoder.gemm_plugin, decoder.gpt_attention_plugin) == ("float16", "float16")
    assert decoder.kv_cache_type == "paged"


def test_the_shipped_config_plans_an_engine():
    config = load_config("configs/large-v3-turbo-trtllm.toml")
    assert config.build.runtime == "tensorrt_llm"
    limits = planned_limits(dims_of("large-v3-turbo"), config, "1.2.1", HOPPER)
    assert limits.max_batch_size == config.runtime.slots
    lines = commands_for(dims_of("large-v3-turbo"), limits, config.runtime.device)
    assert set(lines) == {"encoder", "decoder"}


@pytest.mark.parametrize(
    ("device", "seen", "shown"),
    [("cuda:0", "4,5", None), ("cuda:1", "", "1"), ("cuda:1", "4,5", "5"), ("cuda:1", None, "1")],
)
def test_the_builder_sees_only_the_gpu_that_is_configured(monkeypatch, device, seen, shown):
    """It builds on the first that it sees, whatever the device is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    config = BuildProduct(runtime=RuntimeConfig(device=device))
    before = [] if shown is None else ["env", f"CUDA_VISIBLE_DEVICES={shown}"]
    for line in commands(dims_of("tiny"), config):
        assert line[: len(before) + 1] == [*before, "trtllm-build"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"cuda:2', but CUDA_VISIBLE_DEVICES = '7' shows 1 GPUs"):
        commands(dims_of("tiny"), BuildProduct(runtime=RuntimeConfig(device="cuda:2")))


def test_an_encoder_batch_beyond_the_slots_is_refused():
    config = BuildProduct(runtime=RuntimeConfig(slots=4, encoder_batch=8))
    with pytest.raises(ConfigError, match=r"encoder_batch = 8 exceeds runtime\.slots = 4"):
        check(config)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_build_writes_a_sound_engine_and_nothing_else(checkpoint, fake, tmp_path, precision):
    log = []
    target = tmp_path / "engine"
    engine = compile_engine(checkpoint, make_config(), precision, target, log.append)
    files = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    halves = [f"tensorrt_llm/{half}/" for half in ("encoder", "decoder")]
    expected = {half + name for half in halves for name in ("config.json", "rank0.engine")}
    assert files == expected | {"tokenizer.json", MEL_FILTERS_FILE, MANIFEST_FILE}
    manifest = engine.manifest
    assert (manifest.runtime, manifest.precision) == ("tensorrt_llm", precision)
    assert set(manifest.files) == files - {MANIFEST_FILE}
    assert manifest.versions["tensorrt_llm"] == "1.2.1"
    limits = limits_of(engine)
    assert (limits.gpu, limits.compute_capability) == ("Stand-in GPU", "9.0")
    assert (limits.max_batch_size, limits.encoder_batch, limits.max_beam_width) == (4, 2, 1)
    assert (limits.max_prompt_tokens, limits.max_seq_len) == (228, 448)
    config = json.loads((target / "tensorrt_llm/encoder/config.json").read_text())
    algorithm = config["pretrained_config"]["quantization"]["quant_algo"]
    assert algorithm == {"fp16": None, "int8": "W8A16"}[precision]
    assert any("building WhisperEncoder" in line for line in log)  # the builder's own words
    assert not (tmp_path / ".engine.partial").exists()


def test_an_engine_is_up_to_date_until_something_changes(checkpoint, fake, tmp_path):
    target, config = tmp_path / "engine", make_config()

    def current(runtime=config.runtime, precision="fp16"):
        build = BuildConfig(runtime="tensorrt_llm", precision=precision)
        return up_to_date(
            checkpoint,
            BuildProduct(engine=str(target), runtime=runtime, build=build),
            verified=True,
        )

    assert not current()
    compile_engine(checkpoint, config, "fp16", target)
    assert current()
    assert not current(precision="int8")
    assert not current(make_config(beam_width=2).runtime)
    assert not current(dataclasses.replace(config.runtime, slots=8))
    assert not current(dataclasses.replace(config.runtime, encoder_batch=1))


def test_an_engine_that_was_built_for_less_is_refused(checkpoint, fake, tmp_path):
    planned = planned_limits(checkpoint.dims, make_config(), "1.2.1", HOPPER)
    compile_engine(checkpoint, make_config(), "fp16", tmp_path / "engine")
    trtllm_build.check_built(tmp_path / "engine", checkpoint.dims, planned)
    path = tmp_path / "engine/tensorrt_llm/encoder/config.json"
    config = json.loads(path.read_text())
    config["build_config"]["max_num_tokens"] = 1600
    path.write_text(json.dumps(config))
    with pytest.raises(EngineError, match="built the encoder with max_num_tokens = 1600, expected"):
        trtllm_build.check_built(tmp_path / "engine", checkpoint.dims, planned)


def test_a_failed_build_shows_the_log_and_keeps_the_old_engine(
    checkpoint, fake, tmp_path, monkeypatch
):
    target, config = tmp_path / "engine", make_config()
    compile_engine(checkpoint, config, "fp16", target)
    before = (target / MANIFEST_FILE).read_text()
    # A name that the loader does not know, as when another release's names are written.
    monkeypatch.setattr(trtllm_build, "write_checkpoint", write_old_names)
    log = []
    with pytest.raises(EngineError, match="failed on the encoder with status 1, see its log above"):
        compile_engine(checkpoint, config, "fp16", target, log.append)
    assert "Required but not provided tensors" in log[-1]
    assert (target / MANIFEST_FILE).read_text() == before
    assert open_engine(target)
    assert not (tmp_path / ".engine.partial").exists()


def write_old_names(dims, tensors, precision, folder):
    from safetensors.torch import load_file, save_file

    from build.trtllm.weights import write_checkpoint

    write_checkpoint(dims, tensors, precision, folder)
    path = folder / "encoder" / "rank0.safetensors"
    renamed = {
        name.replace("transformer.layers", "encoder_layers"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)


def test_an_interrupt_stops_the_builder_and_leaves_nothing(checkpoint, fake, tmp_path, monkeypatch):
    builder = tmp_path / "fake-bin" / "trtllm-build"
    builder.write_text('#!/bin/sh\necho $$ > "$PIDFILE"\necho started\nexec sleep 600\n')
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pid_file))
    started = []

    def interrupt(line):
        if line == "started":
            started.append(psutil.Process(int(pid_file.read_text())))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_engine(checkpoint, make_config(), "fp16", tmp_path / "engine", interrupt)
    assert [path.name for path in tmp_path.glob("*engine*")] == [".engine.lock"]
    assert not started[0].is_running()


def test_an_absent_library_is_named(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        UnavailableError, match=r"not installed in .*, expected release 1\.2.*Dockerfile"
    ):
        compile_engine(checkpoint, make_config(), "fp16", tmp_path / "e")


@pytest.mark.parametrize("version", ["1.3.0", "0.20.0"])
def test_another_release_is_refused(checkpoint, tmp_path, monkeypatch, version):
    write_metadata(tmp_path, "tensorrt-llm", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match=f"{version} is installed; expected 1.2, the last"):
        compile_engine(checkpoint, make_config(), "fp16", tmp_path / "e")


def test_no_gpu_and_no_builder_are_named(checkpoint, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path)
    cpu = BuildProduct(runtime=RuntimeConfig(device="cpu"))
    with pytest.raises(UnavailableError, match=r"needs an NVIDIA GPU, but runtime\.device = 'cpu'"):
        compile_engine(checkpoint, cpu, "fp16", tmp_path / "e")
    (tmp_path / "fake-bin" / "trtllm-build").unlink()
    with pytest.raises(UnavailableError, match="trtllm-build is not on the PATH"):
        compile_engine(checkpoint, make_config(), "fp16", tmp_path / "e")


def test_int8_on_blackwell_is_refused_before_the_build(checkpoint, tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, capability=(10, 0))
    with pytest.raises(UnavailableError, match=r"capability 10\.0\); build with PRECISION=fp16"):
        compile_engine(checkpoint, make_config(), "int8", tmp_path / "e")
    compile_engine(checkpoint, make_config(), "fp16", tmp_path / "e")
