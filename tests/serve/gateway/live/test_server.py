"""Live text before a real server, whose engine says nonsense at once."""

import numpy as np
import pytest
import soundfile
import soxr
from websockets.sync.client import connect

from serve.cli.main import main
from serve.contract.errors import UnavailableError
from tests.serve.gateway.live.conftest import RATE, Talk

pytestmark = pytest.mark.server
CLIP = "tests/data/en_question.wav"


def spoken(seconds):
    """PCM as it is sent, of somebody who speaks."""
    samples, rate = soundfile.read(CLIP, dtype="float32")
    samples = np.resize(soxr.resample(samples, rate, RATE), round(seconds * RATE))
    return (samples * 32767).astype("<i2").tobytes()


@pytest.fixture
def talk(server):
    url = f"ws://{server.http}/v1/realtime?intent=transcription&model=whisper-1"
    with connect(url, close_timeout=1) as socket:
        yield Talk(socket)


def test_what_a_client_commits_becomes_text(talk):
    talk.set(transcription={"language": "en", "prompt": "Zoë"}, turn_detection=None)
    talk.audio(spoken(1.0))
    talk.say("input_audio_buffer.commit")
    done = talk.until(".completed")
    assert done["transcript"] and talk.deltas(done["item_id"]) == done["transcript"]
    assert done["usage"]["seconds"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("transcription", "told"),
    [
        ({"prompt": "<|endoftext|>"}, "holds the special token"),
        ({"languages": ["English"] * 1000}, "LANGUAGES has 7000 bytes"),
        ({"phrases": ["Zoë", "oboe^9"]}, "phrases has 'oboe^9'; expected a weight"),
    ],
)
def test_what_the_engine_does_not_take_is_told(talk, transcription, told):
    talk.set(transcription=transcription, turn_detection=None)
    talk.audio(spoken(1.0))
    talk.say("input_audio_buffer.commit")
    assert told in talk.until(".failed")["error"]["message"]


def test_the_command_streams_a_file(server, tmp_path, capsys):
    toml = tmp_path / "live.toml"
    toml.write_text(f"[server]\nhttp_port = {server.http.rpartition(':')[2]}\n")
    assert (
        main(
            [
                "live",
                "--config",
                str(toml),
                *"--languages en,de --phrases Zoë,oboe --pace 0".split(),
                CLIP,
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.strip()
    assert main(["live", "--config", str(toml), "--language", "elvish", CLIP]) == 1
    assert "language = 'elvish'" in capsys.readouterr().err


def test_the_command_says_that_there_is_no_server(tmp_path, capsys, nano_config):
    toml = tmp_path / "live.toml"
    toml.write_text(f"[server]\nhttp_port = {nano_config().server.http_port}\n")
    assert main(["live", "--config", str(toml), CLIP]) == UnavailableError.exit_code
    assert "the server at ws://127.0.0.1:" in capsys.readouterr().err
