"""The model repository that is written for Triton, read back with Triton's own schema."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serve.supervisor.server import write_repository
from serve.wire.tensors import INPUTS, OUTPUTS


@pytest.fixture
def folder(tmp_path):
    """A run's folder with a name that config.pbtxt has to escape."""
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
    return {item.name: (types.Name(item.data_type), tuple(item.dims)) for item in items}


def declared(specs):
    """What Triton is to be told of the tensors of the wire."""
    return {
        name: (f"TYPE_{spec.datatype}".replace("BYTES", "STRING"), tuple(spec.dims))
        for name, spec in specs.items()
    }


def test_the_model_is_configured_for_triton(repository):
    config = read(repository, "whisper")
    assert (config.name, config.backend, config.max_batch_size) == ("whisper", "python", 0)
    assert config.model_transaction_policy.decoupled
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    assert tensors(config.input) == declared(INPUTS)
    assert all(item.optional for item in config.input)
    assert tensors(config.output) == declared(OUTPUTS)


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
