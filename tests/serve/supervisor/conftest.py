"""What exchanges of engines need."""

import json
import shutil

import pytest

from serve.supervisor.control import reload_request, send_request
from serve.wire.client import TritonClient
from tests.serving import audio_file


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """A manifest of clips without texts: the engine before says what is right."""
    folder = tmp_path_factory.mktemp("clips")
    for seed in range(3):
        (folder / f"{seed}.flac").write_bytes(audio_file(2.0, seed=seed))
    lines = [json.dumps({"file": f"{seed}.flac"}) for seed in range(3)]
    (folder / "clips.jsonl").write_text("\n".join(lines))
    return str(folder / "clips.jsonl")


@pytest.fixture
def another(nano_engine, tmp_path):
    return shutil.copytree(nano_engine, tmp_path / "another")


@pytest.fixture
def exchange(clips):
    def exchange(config, engine, **options):
        said = []
        send_request(reload_request(config, str(engine), clips, **options), said.append)
        return said

    return exchange


@pytest.fixture
def client(server):
    with TritonClient(server.grpc, timeout_s=120) as client:
        yield client
