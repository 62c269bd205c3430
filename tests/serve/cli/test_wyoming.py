"""`python -m serve wyoming` before a real server, by the client that Home Assistant has."""

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioStart, wav_to_chunks
from wyoming.client import AsyncClient
from wyoming.error import Error
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong

from serve.cli.main import main
from serve.speech.languages import LANGUAGE_NAMES
from tests.serving import audio_file

WAIT_S = 60.0


@pytest.fixture
def bridge():
    """Start one with some arguments, on a port that the system chooses; gives it and its URI."""
    started = []

    def bridge(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", "wyoming", "--listen", "127.0.0.1:0", *arguments],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "EARSHOT_API_KEY": ""},
        )
        started.append(process)
        ready = process.stdout.readline()
        assert ready.startswith("ready: tcp://127.0.0.1:"), process.communicate()
        return process, ready.split()[1].rstrip(",")

    yield bridge
    for process in started:
        process.kill()
        process.communicate()


def talk(uri, *said, until):
    async def run():
        async with AsyncClient.from_uri(uri, read_timeout=WAIT_S) as client:
            for event in said:
                await client.write_event(event.event())
            event = await client.read_event()
            assert until.is_type(event.type), event
            return until.from_event(event)

    return asyncio.run(run())


def clip(seconds):
    with wave.open(io.BytesIO(audio_file(seconds, "WAV"))) as file:
        return [*wav_to_chunks(file, 1024, start_event=True, stop_event=True)]


@pytest.mark.nightly
@pytest.mark.server
def test_a_real_server(server, bridge):
    process, uri = bridge("--server", f"http://{server.http}/v1/", "--language", "en-US")
    info = talk(uri, Describe(), until=Info)
    assert [model.name for model in info.asr[0].models] == ["nano", "whisper-1"]
    assert info.asr[0].models[0].languages == list(LANGUAGE_NAMES)
    for asked, code in ((Transcribe(language="es"), "es"), (Transcribe(), "en")):
        heard = talk(uri, asked, *clip(1.0), until=Transcript)
        assert heard.text
        assert heard.language == code
    wrong = talk(uri, Transcribe(name="no-such"), *clip(1.0), until=Error)
    assert "no model 'no-such'; there are nano" in wrong.text
    wrong = talk(uri, Transcribe(language="tlh"), *clip(1.0), until=Error)
    assert "language" in wrong.text
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "no model 'no-such'" in errors and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.nightly
def test_a_second_signal_ends_it_even_while_somebody_speaks(bridge, number, tmp_path):
    config = tmp_path / "some.toml"
    config.write_text('[transcriber]\nlanguages = ["es", "en"]\n')
    process, uri = bridge("--config", str(config))

    async def run():
        async with AsyncClient.from_uri(uri, read_timeout=WAIT_S) as client:
            await client.write_event(AudioStart(16_000, 2, 1).event())
            await client.write_event(Ping().event())
            assert Pong.is_type((await client.read_event()).type)  # it has read both
            process.send_signal(number)
            with contextlib.suppress(ConnectionRefusedError):
                while True:  # until it has taken the first
                    await asyncio.sleep(0.01)
                    _, other = await asyncio.open_connection(*uri.removeprefix("tcp://").split(":"))
                    other.close()
            process.send_signal(number)
            with contextlib.suppress(ConnectionError):
                assert await client.read_event() is None

    asyncio.run(run())
    _, errors = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in errors
    assert process.returncode == 0


WRONG = {
    "no server": ([], "no server is named; expected --config TOML or --server URL"),
    "URL": (
        ["--server", "localhost:8000"],
        "--server 'localhost:8000'; expected a URL such as http:",
    ),
    "address": (["--listen", "here:1"], "--listen 'here:1'; expected ADDRESS:PORT"),
    "others": (["--uri", "tcp://0.0.0.0:10300"], "the Wyoming protocol has no keys; add --open"),
    "language": (["--language", "Klingon"], "--language 'Klingon'; expected such as en"),
    "key file": (["--key-file", "/no/such"], "cannot read /no/such: No such file"),
    "keys": (["--key-file", "LINES"], "LINES has characters that are not printable ASCII"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_told_before_it_listens(wrong, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EARSHOT_API_KEY", "")
    monkeypatch.chdir(tmp_path)
    Path("LINES").write_text("a\nb\n")
    arguments, words = WRONG[wrong]
    server = [] if wrong == "no server" else ["--server", "http://127.0.0.1:9"]
    assert main(["wyoming", *server, *arguments]) == 2
    assert words in capsys.readouterr().err
