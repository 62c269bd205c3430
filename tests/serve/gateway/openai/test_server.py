"""OpenAI's API and live text before a real server: by clients, by curl, and as docs/api.md says."""

import re
import shlex
import subprocess
from pathlib import Path

import openai
import pytest

from serve.cli.main import main
from serve.contract.errors import UnavailableError
from tests.serving import CLIP, LONG
from tests.waits import WAIT_S

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
CURLS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("curl ")
]
(SCRIPT,) = re.findall(r"^```python\n(from openai .*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def client(server, client_of):
    return client_of(server, timeout=WAIT_S)


def transcribe(client, audio=CLIP, **options):
    return client.audio.transcriptions.create(
        model="whisper-1", file=("a.flac", audio), language="en", **options
    )


def test_a_stream_says_what_the_answer_says(client):
    whole = transcribe(client, LONG).text
    *deltas, done = transcribe(client, LONG, stream=True)
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == done.text == whole


def test_what_the_transcriber_refuses_has_its_field(client):
    for options, param in (
        ({"temperature": 7}, "temperature"),
        ({"extra_body": {"beam_size": 9}}, "beam_size"),
        ({"extra_body": {"max_tokens": 100_000}}, "max_tokens"),
        ({"audio": b"RIFF"}, "file"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                transcribe(client, stream=stream, **options)
            assert caught.value.param == param


@pytest.mark.needs_program("curl")
@pytest.mark.parametrize("command", CURLS)
def test_curl_as_the_page_has_it(server, command):
    arguments = shlex.split(command.replace("localhost:8000", server.http))
    done = subprocess.run(
        [*arguments, "-sS", "--fail-with-body"], cwd=ROOT, capture_output=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_the_script_in_the_page(server, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(SCRIPT.replace("localhost:8000", server.http), {})
    assert len(capsys.readouterr().out) > 10


# ---------------------------------------------------------------- live text


SPOKEN = "tests/data/en_question.wav"


def test_the_command_streams_a_file(server, tmp_path, capsys):
    toml = tmp_path / "live.toml"
    toml.write_text(f"[server]\nhttp_port = {server.http.rpartition(':')[2]}\n")
    options = "--languages en,de --phrases Zoë,oboe --pace 0".split()
    assert main(["live", "--config", str(toml), *options, SPOKEN]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["live", "--config", str(toml), "--language", "elvish", SPOKEN]) == 1
    assert "language = 'elvish'" in capsys.readouterr().err


def test_the_command_says_that_there_is_no_server(tmp_path, capsys, nano_config):
    toml = tmp_path / "live.toml"
    toml.write_text(f"[server]\nhttp_port = {nano_config().server.http_port}\n")
    assert main(["live", "--config", str(toml), SPOKEN]) == UnavailableError.exit_code
    assert "the server at ws://127.0.0.1:" in capsys.readouterr().err
