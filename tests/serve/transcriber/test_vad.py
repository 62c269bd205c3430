"""Voice activity through the transcriber: what is decoded, what is answered, where words were."""

import dataclasses
import threading

import numpy as np
import pytest

from serve.contract.errors import CancelledError, DeadlineError, EarshotError, OptionError
from serve.speech import vad
from serve.speech.features import SAMPLE_RATE
from tests.fakes import CAPABILITIES, Echo
from tests.harness import (
    ABLE,
    FOREVER,
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


ON_GPU = dataclasses.replace(CAPABILITIES, device="cuda:0", input_kind="samples")


class SlowEar(Ear):
    """A model that reads the rest of a recording only when it may."""

    may_go_on = threading.Event()
    free_calls, fault = 1, None

    def __init__(self):
        super().__init__()
        self.calls = 0

    def probabilities(self, samples):
        self.calls += 1
        if self.calls > self.free_calls:
            assert self.may_go_on.wait(WAIT_S)
            if self.fault is not None:
                raise self.fault
        return super().probabilities(samples)


class TestMeanwhile(TranscriberTests):
    """A GPU decodes a short recording while the rest of it is searched for speech."""

    @pytest.fixture
    def slow(self, monkeypatch):
        monkeypatch.setattr(vad, "VadModel", SlowEar)
        monkeypatch.setattr(SlowEar, "may_go_on", threading.Event())
        return SlowEar

    @pytest.fixture
    def held(self, start, echo, slow):
        """Sends a request, and waits until its job has ended."""

        def send(**config):
            transcriber, runtime = start(echo, ON_GPU, **{"vad": "auto", **config})
            client = Client().send(transcriber, request("so", audio=talk((1, 1), (8, 0))))
            until(lambda: "finish" in [what for what, _ in runtime.log])
            # Another request, in which nothing is searched for, has its answer afterwards.
            transcriber.transcribe(request("other", voice=(0.0, 1.0)))
            assert client.events == []
            return transcriber, runtime, client

        return send

    def test_the_answer_waits_for_the_end_of_the_search(self, held, slow):
        transcriber, runtime, client = held()
        slow.may_go_on.set()
        assert client.transcript.text == "so"
        quiescent(transcriber, runtime)

    def test_without_vad_silence_is_decoded_meanwhile_as_well(self, held, slow, monkeypatch):
        monkeypatch.setattr(slow, "free_calls", 0)
        transcriber, runtime, client = held(vad="off")
        slow.may_go_on.set()
        assert client.transcript.text == "so"
        quiescent(transcriber, runtime)

    def test_the_search_may_end_first(self, start, tokenizer, slow):
        one_at_a_time = dataclasses.replace(ON_GPU, max_windows=1)
        slow.may_go_on.set()
        plays = iter([FOREVER, 0])
        echo = Echo(tokenizer)
        transcriber, runtime = start(
            lambda job: dataclasses.replace(echo(job), delay=next(plays)), one_at_a_time, vad="auto"
        )
        first = Client().send(transcriber, request("first", voice=(0.0, 1.0)))
        until(lambda: runtime.gauges().busy_slots)
        client = Client().send(transcriber, request("so", audio=talk((1, 1), (8, 0))))
        until(lambda: not transcriber._decoders.working)
        first.handle.cancel()
        assert client.transcript.text == "so"

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_client_may_leave_meanwhile(self, held, slow, waits):
        transcriber, runtime, client = held(request_timeout_s=1.0 if waits else WAIT_S)
        if not waits:
            client.handle.cancel()
        assert isinstance(client.error, DeadlineError if waits else CancelledError)
        slow.may_go_on.set()
        quiescent(transcriber, runtime)

    def test_a_fault_of_the_search_ends_the_request(self, held, slow, monkeypatch):
        transcriber, runtime, client = held()
        monkeypatch.setattr(slow, "fault", EarshotError("the model is broken"))
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
