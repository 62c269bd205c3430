"""Sessions by a clock that jumps."""

import asyncio
from unittest.mock import Mock

import numpy as np
import pytest

from eval.live import JumpingLoop, Simulated
from serve.contract.errors import EarshotError
from serve.contract.server_config import LiveConfig
from serve.speech.rate import SAMPLE_RATE
from tests.eval.fakes import transcript
from tests.serve.gateway.live.sessions import LoudIsSpeech

DECODE_S = 0.25
LIVE = LiveConfig(update_s=0.5, short_encoder="on")


class WordASecond:
    """A transcriber of audio with one word a second."""

    def __init__(self):
        self.times_s = []  # the times of its requests

    def transcribe(self, request):
        self.times_s.append(asyncio.get_running_loop().time())
        return transcript(" ".join(f"w{i}" for i in range(len(request.audio) // SAMPLE_RATE)))


async def final_deltas(system, seconds):
    """The times at which words of a tone became final, and the words."""
    tone = np.sin(np.arange(round(seconds * SAMPLE_RATE)) * 0.1) * 0.1
    return [
        (heard.at_s, heard.event["delta"])
        async for heard in system.play([tone.astype(np.float32)], {"language": "en"})
        if heard.event["type"].endswith(".delta")
    ]


def run(work):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


def played(transcriber, seconds, decode_s=DECODE_S):
    return run(final_deltas(Simulated(transcriber, LIVE, decode_s), seconds))


@pytest.fixture(autouse=True)
def loud_is_speech(monkeypatch):
    monkeypatch.setattr("eval.live.VadModel", LoudIsSpeech)


def test_a_decoding_takes_the_configured_time():
    """Audio that comes meanwhile waits for the next one, so words are later."""
    final, decodings = {}, {}
    for decode_s in (0.25, 1.0):
        transcriber = WordASecond()
        final[decode_s] = played(transcriber, 6.0, decode_s)
        decodings[decode_s] = len(transcriber.times_s)
        for at_s, text in final[decode_s]:
            ends_s = int(text.split()[-1][1:]) + 1.0
            assert at_s >= ends_s + decode_s, "it was heard to its end, and decoded"
    assert decodings[1.0] < decodings[0.25]
    soon, late = final.values()
    assert "".join(text for _, text in soon) == "".join(text for _, text in late)
    assert soon[0][0] < late[0][0]


def test_the_result_does_not_depend_on_the_machine():
    one, other = (played(WordASecond(), 6.0) for _ in range(2))
    assert one == other and len(one) > 1


def test_streams_wait_for_one_decoder():
    async def together():
        return await asyncio.gather(*(final_deltas(system, 3.0) for _ in range(2)))

    transcriber = WordASecond()
    system = Simulated(transcriber, LIVE, DECODE_S)
    one, other = run(together())
    assert "".join(text for _, text in one) == "".join(text for _, text in other) == "w0 w1 w2"
    assert len(transcriber.times_s) > 6
    assert min(np.diff(transcriber.times_s)) >= DECODE_S - 1e-9


def test_an_error_of_a_session_is_raised():
    broken = Mock()
    broken.transcribe.side_effect = EarshotError("no text today")
    with pytest.raises(EarshotError, match="no text today"):
        played(broken, 3.0)
