"""OpenAI's API before a real server: by its client, by curl, and as docs/api.md says."""

import re
import shlex
import subprocess
from pathlib import Path

import openai
import pytest

from tests.serving import CLIP, LONG, WAIT_S

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
def client(server, connect):
    return connect(server, timeout=WAIT_S)


def transcribe(client, audio=CLIP, **options):
    return client.audio.transcriptions.create(
        model="whisper-1", file=("a.flac", audio), language="en", **options
    )


def test_each_format(client):
    text = transcribe(client).text
    assert text
    assert transcribe(client, response_format="text") == f"{text}\n"
    assert transcribe(client, response_format="srt").startswith("1\n00:00:0")
    assert transcribe(client, response_format="vtt").startswith("WEBVTT\n")
    answer = transcribe(
        client, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert (answer.text, answer.language, answer.duration) == (text, "english", 1.0)
    assert "".join(segment.text for segment in answer.segments).strip() == text
    assert answer.words


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


def test_a_cut_file_is_refused_or_taken_in_part(client):
    cut = LONG[: len(LONG) // 2]
    with pytest.raises(openai.BadRequestError, match="audio is cut short") as caught:
        transcribe(client, cut)
    assert (caught.value.param, caught.value.code) == ("file", "audio_cut_short")
    ask = {"extra_body": {"partial": True}}
    answer = transcribe(client, cut, response_format="verbose_json", **ask)
    assert answer.text
    assert answer.warnings[0].startswith("audio is cut short")
    *_, done = transcribe(client, cut, stream=True, **ask)
    assert done.warnings == answer.warnings


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
