"""Triton's layout for TensorRT-LLM: the rendered files, the calls between the models, the whole."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serve.contract.config import TranscriberConfig
from serve.contract.engine import MANIFEST_FILE, manifest_to_json
from serve.contract.errors import ConfigError, EarshotError, EngineError, OptionError
from serve.contract.messages import Request
from serve.contract.server_config import ServerConfig
from serve.runtime.protocol import DecodingOptions, Job
from serve.supervisor import repository as repository_module
from serve.supervisor.repository import write_repository
from serve.supervisor.run import free_ports, running_server
from serve.trtllm.backend import OUTPUTS, open_backend
from serve.trtllm.executor import open_tensorrt_llm
from serve.trtllm.triton_model import NAME
from serve.wire.client import Client
from tests.fake_trtllm import facts
from tests.fake_trtllm.install import FACTS, HERE, make_config
from tests.fake_trtllm.jobs import DETECT, PLAIN, make_job, run
from tests.runtimes import TRTLLM

TYPES = {
    np.float16: model_config_pb2.TYPE_FP16,
    np.float32: model_config_pb2.TYPE_FP32,
    np.int32: model_config_pb2.TYPE_INT32,
    np.uint64: model_config_pb2.TYPE_UINT64,
    np.bool_: model_config_pb2.TYPE_BOOL,
}


@pytest.fixture
def rendered(small_engine, tmp_path):
    """The model's config.pbtxt, parsed with Triton's own schema."""
    config = make_config(kv_cache_fraction=0.6, cross_kv_fraction=0.7, triton_backend=True)
    models = write_repository(tmp_path, tmp_path / "c.toml", small_engine.path, config.runtime)
    assert (models / NAME / "1").is_dir()
    said = (models / "whisper" / "config.pbtxt").read_text()
    assert f'"decodes" value: {{ string_value: "{NAME}"' in said
    text = (models / NAME / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_decoding_model_is_configured_from_engine_and_toml(rendered, small_engine):
    assert (rendered.name, rendered.backend) == (NAME, "tensorrtllm")
    assert rendered.max_batch_size == 4
    assert not rendered.model_transaction_policy.decoupled
    parameters = {key: value.string_value for key, value in rendered.parameters.items()}
    engines = small_engine.path.resolve() / "tensorrt_llm"
    assert parameters["gpt_model_path"] == str(engines / "decoder")
    assert parameters["encoder_model_path"] == str(engines / "encoder")
    assert parameters["gpt_model_type"] == "inflight_fused_batching"
    assert parameters["kv_cache_free_gpu_mem_fraction"] == "0.6"
    assert parameters["cross_kv_cache_fraction"] == "0.7"
    assert parameters["enable_kv_cache_reuse"] == "false"
    assert parameters["normalize_log_probs"] == "false"
    assert parameters["max_beam_width"] == "1"
    assert parameters["gpu_device_ids"] == "0"
    assert parameters.keys() >= facts.UNGUARDED, "without these the model does not load"
    assert parameters.keys() <= facts.UNGUARDED | facts.GUARDED.keys() | facts.BY_TRITON
    assert not parameters["guided_decoding_backend"]
    assert "$" not in "".join(parameters.values())


def test_the_decoding_models_tensors_are_the_real_ones(rendered):
    def declared(tensor):
        return model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims)

    for tensor in rendered.input:
        assert (*declared(tensor), tensor.optional) == facts.INPUTS[tensor.name], tensor.name
        assert tensor.HasField("reshape") == (list(tensor.dims) == [1]), tensor.name
    for tensor in rendered.output:
        assert declared(tensor) == facts.OUTPUTS[tensor.name], tensor.name


def test_only_engines_of_the_runtime_get_a_second_model(native_engine, tmp_path):
    asked = tmp_path, tmp_path / "c.toml", native_engine.path
    with pytest.raises(EngineError, match="is for the runtime 'native', expected 'tensorrt_llm'"):
        write_repository(*asked, make_config(triton_backend=True).runtime)
    models = write_repository(*asked, make_config().runtime)
    assert [path.name for path in models.iterdir()] == ["whisper"]


def scripted(tokens, logprob=-1.5):
    """An `Infer` that notes its inputs and answers the same each time."""
    calls = []

    def infer(inputs, outputs):
        assert outputs == OUTPUTS
        calls.append(inputs)
        return {
            "output_ids": np.array([[[*tokens, FACTS.eot]]], np.int32),
            "sequence_length": np.array([[len(tokens)]], np.int32),
            "cum_log_probs": np.array([[logprob]], np.float32),
        }

    return infer, calls


@pytest.fixture
def opened(small_engine):
    runtimes = []

    def opened(infer, **trtllm):
        runtimes.append(open_backend(small_engine, make_config(**trtllm).runtime, infer))
        return runtimes[-1]

    yield opened
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def beams_of_2(small_engine):
    """The engine, as if it were built for beams of 2: nothing opens what it holds."""
    manifest = small_engine.manifest
    limits = {**manifest.runtime_options, "max_beam_width": 2}
    manifest = dataclasses.replace(manifest, runtime_options=limits)
    return dataclasses.replace(small_engine, manifest=manifest)


def test_a_call_has_the_beam_that_its_job_asks_for(beams_of_2):
    infer, calls = scripted([5])
    runtime = open_backend(beams_of_2, make_config(beam_width=2).runtime, infer)
    for id, options in enumerate(({}, {"beam_size": 2}, {"temperature": 0.5})):
        run(runtime, make_job(id, PLAIN, **options))
    assert [call["beam_width"].item() for call in calls] == [1, 2, 1]
    assert ["runtime_top_k" in call for call in calls] == [True, False, False]
    assert [call["len_penalty"].item() for call in calls if "len_penalty" in call] == [1.0]
    with pytest.raises(OptionError, match="best_of = 2"):
        runtime.submit(make_job(5, PLAIN, best_of=2))
    runtime.close()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5, "seed": 9}, {"beam_size": 2}], ids=str
)
def test_calls_fit_the_models_declared_inputs(beams_of_2, rendered, options):
    infer, calls = scripted([5, 6, 7])
    runtime = open_backend(beams_of_2, make_config(beam_width=2).runtime, infer)
    tokens, last = run(runtime, make_job(1, PLAIN, **options))[1]
    runtime.close()
    assert (tokens, last.finished) == ((5, 6, 7), "eot")
    assert last.scores.avg_logprob == pytest.approx(-1.5 / 4)  # the end counts
    declared = {item.name: item for item in rendered.input}
    (inputs,) = calls
    for name, value in inputs.items():
        assert value.shape[0] == 1  # the batch
        dims = list(declared[name].dims)
        assert len(value.shape) - 1 == len(dims), name
        assert all(d in (-1, n) for d, n in zip(dims, value.shape[1:], strict=True)), name
        assert TYPES[value.dtype.type] == declared[name].data_type, name
    required = {item.name for item in rendered.input if not item.optional}
    assert required <= set(inputs)
    assert set(OUTPUTS) <= {item.name for item in rendered.output}
    assert inputs["encoder_input_features"].shape == (1, 3000, 80)
    assert inputs["input_lengths"].item() == 3000
    assert inputs["encoder_output_lengths"].item() == 1500
    assert inputs["decoder_input_ids"].tolist() == [list(PLAIN)]


def test_a_full_answer_has_ended_by_length(opened):
    infer, _ = scripted([5, 6, 7])
    tokens, last = run(opened(infer), make_job(1, PLAIN, max_tokens=3))[1]
    assert (tokens, last.finished) == ((5, 6, 7), "length")


def test_detection_lets_the_bias_choose_among_the_languages(opened):
    spanish = FACTS.languages["es"]
    infer, calls = scripted([spanish], logprob=-0.5)
    job = Job(
        1, torch.zeros(80, 3000), (*DETECT, FACTS.no_timestamps), DecodingOptions(timestamps=False)
    )
    scores = run(opened(infer), job)[1][1].scores
    assert scores.language == spanish
    assert scores.language_prob == pytest.approx(np.exp(-0.5))
    probe, decode = calls
    assert probe["request_output_len"].item() == 1
    free = np.flatnonzero(probe["embedding_bias"][0] == 0).tolist()
    assert free == sorted(FACTS.languages.values())
    assert decode["decoder_input_ids"][0].tolist() == [
        FACTS.sot,
        spanish,
        FACTS.transcribe,
        FACTS.no_timestamps,
    ]


@pytest.mark.parametrize("error", [EarshotError("model is not ready"), KeyError("output_ids")])
def test_a_failed_call_ends_its_window_alone(opened, error):
    def infer(inputs, outputs):
        raise error

    _, last = run(opened(infer), make_job(1, PLAIN))[1]
    assert last.finished == "error"
    assert str(error) in str(last.error)


def test_what_the_model_cannot_do_is_refused(opened):
    runtime = opened(scripted([5])[0])
    able = runtime.capabilities
    assert not (able.timestamps or able.streaming or able.cancel or able.no_speech_prob)
    with pytest.raises(OptionError, match="timestamps"):
        runtime.submit(make_job(1, PLAIN, timestamps=True))
    with pytest.raises(ConfigError, match="no_speech_probe needs the logits"):
        opened(scripted([5])[0], no_speech_probe=True)


@pytest.mark.nightly
@pytest.mark.server
def test_two_models_in_a_real_server_say_what_one_process_says(
    compiled,
    tmp_path,
    monkeypatch,
):
    """Triton itself, our model in front, the stand-in for the C++ model behind it."""
    write = repository_module._write_decoding_model

    def with_stand_in(repository, engine_path, config):
        model = write(repository, engine_path, config)
        path = repository / model / "config.pbtxt"
        path.write_text(path.read_text().replace('"tensorrtllm"', '"python"'))
        (repository / model / "1" / "model.py").symlink_to(HERE / "triton_model" / "model.py")
        for name in (
            "tensorrt_llm",
            "plain_whisper.py",
            "facts.py",
        ):  # Triton puts this folder on its path
            (repository / model / "1" / name).symlink_to(HERE / name)
        return model

    monkeypatch.setattr(repository_module, "_write_decoding_model", with_stand_in)
    http, grpc, metrics = free_ports("127.0.0.1", 3)
    trtllm = dataclasses.replace(
        TRTLLM.runtime.tensorrt_llm, triton_backend=True, logits_processor=False
    )
    config = dataclasses.replace(
        TRTLLM,
        engine=str(only_text(compiled, tmp_path / "engine")),
        runtime=dataclasses.replace(TRTLLM.runtime, tensorrt_llm=trtllm),
        transcriber=TranscriberConfig(max_tokens=8, temperatures=(0.0,)),
        server=ServerConfig(http_port=http, grpc_port=grpc, metrics_port=metrics),
    )
    noise = [np.random.default_rng(i).normal(0, 0.1, 32_000).astype("f4") for i in range(6)]
    asked = [
        Request(
            item,
            sample_rate=16_000,
            timestamps=False,
            language=None if i % 2 else "es",
            vad=False,  # it is noise
        )
        for i, item in enumerate(noise)
    ]
    with running_server(config) as server, Client(server.grpc) as client:
        calls = [client.start(request) for request in asked]  # all at once
        found = [call.result() for call in calls]
        with pytest.raises(OptionError, match="timestamps = true"):
            client.start(dataclasses.replace(asked[0], timestamps=True)).result()
    expected = in_process(config, asked)
    assert [(t.text, t.language) for t in found] == [(t.text, t.language) for t in expected]
    assert any(transcript.text for transcript in found)


def only_text(engine, target):
    """A copy of an engine that suppresses all but text, of which its random weights say little."""
    shutil.copytree(engine.path, target)
    facts, n_vocab = engine.manifest.tokenizer, engine.manifest.dims.n_vocab
    facts = dataclasses.replace(facts, suppress_tokens=tuple(range(facts.eot, n_vocab)))
    manifest = dataclasses.replace(engine.manifest, tokenizer=facts)
    (target / MANIFEST_FILE).write_text(manifest_to_json(manifest))
    return target


def in_process(config, asked):
    from serve.transcriber.open import open_transcriber

    transcriber = open_transcriber(config, start=open_tensorrt_llm)
    try:
        return [transcriber.transcribe(request) for request in asked]
    finally:
        transcriber.close()
