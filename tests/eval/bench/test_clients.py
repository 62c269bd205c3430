"""Clients of the bench: what they send, what they refuse, how they are shared out."""

import io

import pytest
import soundfile

from eval.bench.clients import RequestSpec, clients_of, timed_request, wav
from serve.contract.errors import EarshotError, UnavailableError
from serve.contract.messages import Timings, Transcript
from serve.supervisor.run import free_ports


def test_a_file_of_noise_lasts_as_long_as_it_should():
    info = soundfile.info(io.BytesIO(wav(0.5, seed=1)))
    assert (info.frames, info.samplerate, info.subtype) == (8000, 16_000, "PCM_16")
    assert wav(0.5, seed=1) != wav(0.5, seed=2)


class Says:
    """A client whose answers are given."""

    def __init__(self, text, duration):
        timings = Timings(0.0, 0.0, 0.0, 0.0)
        self.transcript = Transcript(text, "en", None, duration, (), timings)
        self.options = None

    def transcribe(self, audio, **options):
        self.options = options
        return self.transcript


def test_an_answer_without_text_or_of_another_length_is_refused():
    spec, good = RequestSpec(1.0, 7), Says("words", 1.0)
    assert timed_request(good, b"", spec).latency_s >= 0
    assert good.options == {"language": "en", "timestamps": False, "max_tokens": 7}
    for bad in (Says("", 1.0), Says("words", 0.9)):
        with pytest.raises(EarshotError, match=r"expected text for 1\.0 s"):
            timed_request(bad, b"", spec)


def test_clients_without_a_server_say_so():
    (port,) = free_ports("127.0.0.1", 1)
    with (
        pytest.raises(UnavailableError, match=f"127.0.0.1:{port}"),
        clients_of(f"127.0.0.1:{port}", [RequestSpec(0.1, 3)], 2, 1) as clients,
    ):
        clients.answers()
