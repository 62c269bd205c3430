"""The model repository that is written for Triton, read back with Triton's own schema."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serve.supervisor.repository import write_repository

INPUTS = [
    ("AUDIO", "TYPE_STRING", [1]),
    ("SAMPLES", "TYPE_FP32", [-1]),
    ("SAMPLE_RATE", "TYPE_INT32", [1]),
    ("LANGUAGE", "TYPE_STRING", [1]),
    ("LANGUAGES", "TYPE_STRING", [-1]),
    ("MULTILINGUAL", "TYPE_BOOL", [1]),
    ("TASK", "TYPE_STRING", [1]),
    ("PROMPT", "TYPE_STRING", [1]),
    ("HOTWORDS", "TYPE_STRING", [1]),
    ("PHRASES", "TYPE_STRING", [-1]),
    ("PREFIX", "TYPE_STRING", [1]),
    ("MODE", "TYPE_STRING", [1]),
    ("PARTIAL", "TYPE_BOOL", [1]),
    ("AUDIO_TRACK", "TYPE_STRING", [1]),
    ("TIMESTAMPS", "TYPE_BOOL", [1]),
    ("WORD_TIMESTAMPS", "TYPE_BOOL", [1]),
    ("TRY_WORD_TIMESTAMPS", "TYPE_BOOL", [1]),
    ("TOKEN_LOGPROBS", "TYPE_BOOL", [1]),
    ("LOW_CONFIDENCE", "TYPE_FP32", [1]),
    ("CHANNELS", "TYPE_STRING", [1]),
    ("DIARIZE", "TYPE_BOOL", [1]),
    ("NUM_SPEAKERS", "TYPE_INT32", [1]),
    ("MIN_SPEAKERS", "TYPE_INT32", [1]),
    ("MAX_SPEAKERS", "TYPE_INT32", [1]),
    ("KNOWN_SPEAKER_NAMES", "TYPE_STRING", [-1]),
    ("KNOWN_SPEAKER_REFERENCES", "TYPE_STRING", [-1]),
    ("CLIP_TIMESTAMPS", "TYPE_FP64", [-1]),
    ("HALLUCINATION_SILENCE_THRESHOLD", "TYPE_FP32", [1]),
    ("VAD", "TYPE_STRING", [1]),
    ("VOICE", "TYPE_FP64", [-1]),
    ("VAD_THRESHOLD", "TYPE_FP32", [1]),
    ("VAD_MIN_SPEECH_S", "TYPE_FP32", [1]),
    ("VAD_MIN_SILENCE_S", "TYPE_FP32", [1]),
    ("VAD_PAD_S", "TYPE_FP32", [1]),
    ("TEMPERATURE", "TYPE_FP32", [1]),
    ("MAX_TOKENS", "TYPE_INT32", [1]),
    ("BEAM_SIZE", "TYPE_INT32", [1]),
    ("PATIENCE", "TYPE_FP32", [1]),
    ("LENGTH_PENALTY", "TYPE_FP32", [1]),
    ("BEST_OF", "TYPE_INT32", [1]),
    ("REPETITION_PENALTY", "TYPE_FP32", [1]),
    ("NO_REPEAT_NGRAM_SIZE", "TYPE_INT32", [1]),
    ("SUPPRESS_BLANK", "TYPE_BOOL", [1]),
    ("SHORT_ENCODER", "TYPE_BOOL", [1]),
    ("UNFINISHED", "TYPE_BOOL", [1]),
    ("DRAFT", "TYPE_INT32", [-1]),
    ("STREAM", "TYPE_BOOL", [1]),
]
OUTPUTS = [
    ("TEXT", "TYPE_STRING", [1]),
    ("SEGMENTS", "TYPE_STRING", [1]),
    ("LANGUAGE", "TYPE_STRING", [1]),
    ("LANGUAGE_PROB", "TYPE_FP32", [1]),
    ("DURATION", "TYPE_FP64", [1]),
    ("TIMINGS", "TYPE_STRING", [1]),
    ("TOKENS", "TYPE_INT32", [-1]),
    ("WARNINGS", "TYPE_STRING", [-1]),
    ("PHASES", "TYPE_STRING", [1]),
]


@pytest.fixture
def folder(tmp_path):
    """A run's folder whose name config.pbtxt has to escape."""
    folder = tmp_path / 'a "run" \\ é'
    folder.mkdir()
    return folder


@pytest.fixture
def repository(folder):
    return write_repository(folder, folder / "some.toml", folder / "engine")


def read(repository, name):
    text = (repository / name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def tensors(items):
    types = model_config_pb2.DataType
    return [(item.name, types.Name(item.data_type), list(item.dims)) for item in items]


def test_the_model_is_configured_for_triton(repository):
    config = read(repository, "whisper")
    assert (config.name, config.backend, config.max_batch_size) == ("whisper", "python", 0)
    assert config.model_transaction_policy.decoupled
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    assert tensors(config.input) == INPUTS
    assert all(item.optional for item in config.input)
    assert tensors(config.output) == OUTPUTS


def test_the_model_has_the_run_and_this_code(repository, folder):
    assert repository == folder / "models"
    assert [path.name for path in repository.iterdir()] == ["whisper"]
    parameters = read(repository, "whisper").parameters
    assert {key: value.string_value for key, value in parameters.items()} == {
        "config": str(folder / "some.toml"),
        "engine": str(folder / "engine"),
        "folder": str(folder),
    }
    code = repository / "whisper" / "1"
    assert "class TritonPythonModel" in (code / "model.py").read_text(encoding="utf-8")
    assert (code / "serve" / "wire" / "tensors.py").is_file()


def test_an_engine_given_by_a_relative_path_is_found_from_anywhere(folder, monkeypatch):
    """The model runs in another working directory than the launcher."""
    monkeypatch.chdir(folder)
    repository = write_repository(folder, folder / "some.toml", Path("engine"))
    engine = read(repository, "whisper").parameters["engine"].string_value
    assert engine == str(folder / "engine")
