"""Voice activity through the transcriber: what is decoded, what is answered, where words were."""

import threading

import numpy as np
import pytest

from serve.contract.errors import CancelledError, EarshotError, OptionError
from serve.speech import vad
from serve.speech.features import SAMPLE_RATE
from tests.fakes import Echo
from tests.harness import (
    ABLE,
    WAIT_S,
    Client,
    TranscriberTests,
    noise,
    quiescent,
    request,
    until,
)
from tests.serve.speech.sounds import Ear


def talk(*parts):
    """Noise for speech, zeros elsewhere: (seconds, whether it is speech)."""
    return np.concatenate([noise(seconds) * on for seconds, on in parts]).astype(np.float32)


@pytest.fixture(autouse=True)
def ear(monkeypatch):
    monkeypatch.setattr(vad, "VadModel", Ear)


class TestVoiceActivity(TranscriberTests):
    """Over a fake runtime: each window says the prompt from 0 to 1 s."""

    def test_times_are_those_of_the_whole_audio(self, start, echo):
        transcriber, runtime = start(echo, vad="auto")
        audio = talk((45, 0), (1, 1), (4, 0))
        answer = transcriber.transcribe(request("so", audio=audio))
        assert len(runtime.jobs) == 1 and runtime.jobs[0].urgent
        (segment,) = answer.segments
        assert 44.5 < segment.start < 44.7 and answer.duration == pytest.approx(50.0)
        assert segment.end == pytest.approx(segment.start + 1.0, abs=1e-3)
        quiescent(transcriber, runtime)

    def test_a_request_says_what_counts_as_speech(self, start, echo):
        transcriber, _ = start(echo, vad="auto")
        audio = talk((45, 0), (2, 1), (3, 0))
        for pad_s in (0.0, 1.0):
            answer = transcriber.transcribe(request("so", audio=audio, vad_pad_s=pad_s))
            assert answer.segments[0].start == pytest.approx(45 - pad_s, abs=0.1)
        with pytest.raises(OptionError, match=r"^vad_pad_s = 1\.0, but VAD is off"):
            transcriber.transcribe(request(audio=audio, vad=False, vad_pad_s=1.0))

    def test_words_after_a_pause_are_where_they_were_said(self, start, echo):
        transcriber, _ = start(echo, ABLE)
        audio = talk((0.2, 1), (9, 0), (4, 1))
        options = {"vad": True, "word_timestamps": True, "timestamps": False}
        (segment,) = transcriber.transcribe(
            request("over the fox", audio=audio, **options)
        ).segments
        assert [word.word for word in segment.words] == [" over", " the", " fox"]
        first, *rest = segment.words
        assert all(word.start > 8.5 for word in rest) and segment.end == rest[-1].end < 13.2
        starts = [time for word in segment.words for time in (word.start, word.end)]
        assert starts == sorted(starts) and segment.start == first.start

    @pytest.mark.parametrize("language", ["en", None])
    def test_without_speech_the_answer_is_empty_and_the_device_idle(self, start, echo, language):
        transcriber, runtime = start(echo, vad="auto")
        audio = np.zeros(100 * SAMPLE_RATE, np.float32)
        client = Client().send(transcriber, request("so", audio=audio, language=language))
        answer = client.transcript
        assert (answer.text, answer.segments, runtime.jobs) == ("", (), [])
        assert (answer.language, answer.language_prob) == (language, None)
        assert answer.duration == 100.0 and answer.timings.decode_s == 0.0
        assert 0 <= answer.timings.queue_s <= answer.timings.total_s
        assert len(client.events) == 1
        quiescent(transcriber, runtime)

    @pytest.mark.parametrize(
        ("configured", "asked", "jobs"),
        [("auto", None, 0), ("auto", False, 1), ("off", None, 1), ("off", True, 0)],
    )
    def test_the_request_goes_before_the_config(self, start, echo, configured, asked, jobs):
        transcriber, runtime = start(echo, vad=configured)
        audio = np.zeros(20 * SAMPLE_RATE, np.float32)
        transcriber.transcribe(request("so", audio=audio, vad=asked))
        assert len(runtime.jobs) == jobs

    def test_nothing_listens_where_the_request_says_who_speaks(self, start, echo, monkeypatch):
        monkeypatch.setattr(vad, "VadModel", lambda: 1 / 0)
        transcriber, _ = start(echo, vad="auto")
        asked = request("so", audio=talk((0.2, 0), (0.8, 1)), voice=(0.2, 1.0))
        assert transcriber.transcribe(asked).text == "so"


class SlowEar(Ear):
    """A model that reads the rest of a recording only when it may."""

    may_go_on = threading.Event()
    fault = None

    def __init__(self):
        super().__init__()
        self.called = False

    def probabilities(self, samples):
        if self.called:
            assert self.may_go_on.wait(WAIT_S)
            if self.fault is not None:
                raise self.fault
        self.called = True
        return super().probabilities(samples)


class TestMeanwhile(TranscriberTests):
    """A short recording is decoded while the rest of it is searched for speech."""

    @pytest.fixture
    def slow(self, monkeypatch):
        monkeypatch.setattr(vad, "VadModel", SlowEar)
        monkeypatch.setattr(SlowEar, "may_go_on", threading.Event())
        return SlowEar

    def test_the_answer_waits_for_the_end_of_the_search(self, start, echo, slow):
        transcriber, runtime = start(echo, vad="auto")
        sent = request("so", audio=talk((1, 1), (8, 0)))
        client = Client().send(transcriber, sent)
        until(lambda: runtime.jobs and not runtime.gauges().busy_slots)
        assert client.events == []
        slow.may_go_on.set()
        assert client.transcript.text == "so"
        quiescent(transcriber, runtime)

    def test_the_search_may_end_first(self, start, tokenizer, slow):
        transcriber, runtime = start(Echo(tokenizer, delay=3), vad="auto")
        slow.may_go_on.set()
        assert transcriber.transcribe(request("so", audio=talk((1, 1), (8, 0)))).text == "so"
        quiescent(transcriber, runtime)

    def test_a_client_may_leave_meanwhile(self, start, echo, slow):
        transcriber, runtime = start(echo, vad="auto")
        client = Client().send(transcriber, request("so", audio=talk((1, 1), (8, 0))))
        until(lambda: runtime.jobs)
        client.handle.cancel()
        assert isinstance(client.error, CancelledError)
        slow.may_go_on.set()
        quiescent(transcriber, runtime)

    def test_a_fault_of_the_search_ends_the_request(self, start, echo, slow, monkeypatch):
        monkeypatch.setattr(slow, "fault", EarshotError("the model is broken"))
        transcriber, runtime = start(echo, vad="auto")
        client = Client().send(transcriber, request("so", audio=talk((1, 1), (8, 0))))
        until(lambda: runtime.jobs)
        slow.may_go_on.set()
        assert str(client.error) == "the model is broken"
        monkeypatch.setattr(slow, "fault", None)
        quiescent(transcriber, runtime)


class TestStretches(TranscriberTests):
    """What `clip_timestamps` asks for, and nothing else."""

    def test_times_are_those_of_the_whole_audio(self, start, echo):
        transcriber, runtime = start(echo, vad="auto")
        wanted = {"clip_timestamps": (2, 3.5, 10, 50, 90, 91, 500, 600)}
        answer = transcriber.transcribe(request("so", audio=noise(100.0), **wanted))
        starts = [segment.start for segment in answer.segments]
        assert starts[0] == 2 and 90 in starts and len(starts) == len(runtime.jobs) >= 4
        assert all(10 <= start < 50 for start in starts[1:-1])
        assert answer.duration == 100.0
        part = transcriber.transcribe(request("so", audio=noise(100.0), clip_timestamps=(1, 2)))
        assert (part.duration, part.segments[0].start) == (2.0, 1.0)
        quiescent(transcriber, runtime)
