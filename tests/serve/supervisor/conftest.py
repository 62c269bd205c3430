"""What exchanges of engines need."""

import json
import shutil

import pytest

from serve.supervisor.control import ReloadRequest, send_request
from serve.wire.client import TritonClient
from tests.serving import audio_file


@pytest.fixture
def another(nano_engine, tmp_path):
    return shutil.copytree(nano_engine, tmp_path / "another")


@pytest.fixture
def exchange(tmp_path):
    """Reload an engine, which must write the same texts as the present one."""

    def exchange(config, engine, **options):
        lines, said = [], []
        with TritonClient(f"127.0.0.1:{config.server.grpc_port}", timeout_s=120) as client:
            for seed in range(3):
                audio = audio_file(2.0, seed=seed)
                (tmp_path / f"{seed}.flac").write_bytes(audio)
                text = client.transcribe(audio).text
                lines.append(json.dumps({"file": f"{seed}.flac", "text": text}))
        (tmp_path / "clips.jsonl").write_text("\n".join(lines))
        clips = str(tmp_path / "clips.jsonl")
        send_request(ReloadRequest(config, str(engine), clips, **options), said.append)
        return said

    return exchange


@pytest.fixture
def client(server):
    with TritonClient(server.grpc, timeout_s=120) as client:
        yield client
