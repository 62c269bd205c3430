"""Who says what: by channel, and by voice with a stand-in for what tells voices apart."""

import base64
import dataclasses
import threading

import numpy as np
import pytest

from serve.contract.errors import AudioError, EarshotError, RequestError
from serve.contract.messages import RequestFinished, SegmentReady
from serve.speakers.diarize import SpeakerTurn
from serve.speech import vad
from serve.speech.features import SAMPLE_RATE
from serve.transcriber import audio_decoder_pool
from tests.harness import ABLE, WAIT_S, Client, TranscriberTests, noise, quiescent, request
from tests.serve.speech.sounds import Ear, encode

VOICE = f"data:audio/wav;base64,{base64.b64encode(encode(noise(3.0), 'WAV', 'PCM_16')).decode()}"


def recording(channels, seconds=1.0, format="WAV"):
    """A file's bytes; the channels differ."""
    levels = np.linspace(0.1, 0.5, channels, dtype=np.float32)
    sound = np.random.default_rng(0).uniform(-1, 1, (round(seconds * SAMPLE_RATE), channels))
    return encode((sound * levels).astype(np.float32), format, "PCM_16")


def split(audio, **options):
    options = {"sample_rate": None, "channels": "split", **options}
    return request("over the fox", audio=audio, **options)


class TestChannels(TranscriberTests):
    """Over a fake runtime: each window says the prompt from 0 to 1 s."""

    @pytest.mark.parametrize("format", ["WAV", "FLAC"])  # read here, and in the sandbox
    @pytest.mark.parametrize("channels", [2, 3])
    def test_each_channel_is_a_speaker(self, start, echo, channels, format):
        transcriber, runtime = start(echo)
        client = Client().send(transcriber, split(recording(channels, format=format)))
        answer = client.transcript
        assert [segment.speaker for segment in answer.segments] == list("ABC"[:channels])
        assert {(segment.start, segment.end) for segment in answer.segments} == {(0.0, 1.0)}
        assert answer.duration == pytest.approx(1.0)
        assert [event.segment for event in client.events[:-1]] == list(answer.segments)
        quiescent(transcriber, runtime)

    def test_what_is_said_at_the_same_time_stands_side_by_side(self, start, echo):
        transcriber, _ = start(echo)
        answer = transcriber.transcribe(split(recording(2, seconds=65.0)))
        starts = [segment.start for segment in answer.segments]
        assert starts == sorted(starts) and len(starts) == 6
        speakers = [segment.speaker for segment in answer.segments]
        assert [set(speakers[i : i + 2]) for i in (0, 2, 4)] == [{"A", "B"}] * 3
        assert answer.duration == pytest.approx(65.0)

    def test_silent_channels_are_passed_over(self, start, echo, monkeypatch):
        """However many: what gives no window must not count as decoded ahead."""
        monkeypatch.setattr(vad, "VadModel", Ear)
        transcriber, runtime = start(echo, vad="auto")
        for speaker in ("A", "H"):
            sound = np.zeros((SAMPLE_RATE, 8), np.float32)
            sound[:, "ABCDEFGH".index(speaker)] = noise(1.0)
            answer = transcriber.transcribe(split(encode(sound, "WAV", "PCM_16")))
            assert [segment.speaker for segment in answer.segments] == [speaker]
            assert answer.duration == pytest.approx(1.0)
        quiescent(transcriber, runtime)

    def test_text_of_one_channel_is_no_context_of_the_next(self, start, echo):
        transcriber, runtime = start(echo)
        transcriber.transcribe(split(recording(2, seconds=40.0), mode="sequential"))
        prompts = [job.prompt for job in runtime.jobs]
        assert len(prompts) == 4
        assert prompts[0] == prompts[2] and len(prompts[1]) > len(prompts[0])

    @pytest.mark.parametrize(("channels", "found"), [(1, "1 channel;"), (9, "9 channels;")])
    def test_other_numbers_of_channels_are_refused(self, start, echo, channels, found):
        transcriber, runtime = start(echo)
        with pytest.raises(AudioError, match=f"^audio has {found} expected 2 to 8, one"):
            transcriber.transcribe(split(recording(channels)))
        quiescent(transcriber, runtime)


class Voices:
    """Stands for the diarizer: says what a test has told it to."""

    def __init__(self, turns=(), error=None):
        self.turns, self.error, self.calls = turns, error, []
        self.go_on = threading.Event()
        self.go_on.set()

    def diarize(self, blocks, **options):
        self.calls.append((sum(map(len, blocks)), options))
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self.turns


@pytest.fixture
def voices(monkeypatch):
    made = Voices((SpeakerTurn(0.0, 1.5, "A"), SpeakerTurn(1.5, 9.0, "B")))
    monkeypatch.setattr(audio_decoder_pool, "Diarizer", lambda device: made)
    return made


def apart(**options):
    return request("over the fox. I see it.", audio=noise(3.0), **{"diarize": True, **options})


class TestVoices(TranscriberTests):
    """Over a fake runtime: in its alignments all tokens take equally long."""

    def test_segments_break_where_another_speaks(self, start, echo, voices, tokenizer):
        transcriber, runtime = start(echo, ABLE)
        whole = transcriber.transcribe(dataclasses.replace(apart(), diarize=False))
        client = Client().send(transcriber, apart(word_timestamps=True, token_logprobs=True))
        answer = client.transcript
        first, second = answer.segments
        assert (first.speaker, second.speaker) == ("A", "B")
        assert first.text + second.text == whole.segments[0].text == " over the fox. I see it."
        assert answer.text == whole.text
        assert first.tokens + second.tokens == whole.segments[0].tokens
        for part in (first, second):
            assert tokenizer.decode(part.tokens) == part.text
            assert "".join(piece.token for piece in part.token_logprobs) == part.text
            assert part.words[0].start >= part.start and part.words[-1].end <= part.end
        assert [type(event) for event in client.events] == [
            SegmentReady,
            SegmentReady,
            RequestFinished,
        ]
        assert voices.calls[0][0] == 3 * SAMPLE_RATE
        quiescent(transcriber, runtime)

    def test_words_come_only_to_those_who_ask(self, start, echo, voices):
        transcriber, _ = start(echo, ABLE)
        answer = transcriber.transcribe(apart())
        assert len(answer.segments) == 2
        assert all(segment.words is None for segment in answer.segments)

    def test_what_is_known_is_told(self, start, echo, voices):
        transcriber, _ = start(echo, ABLE)
        known = {"known_speaker_names": ("Ann",), "known_speaker_references": (VOICE,)}
        transcriber.transcribe(apart(min_speakers=2, max_speakers=3, **known))
        ((_, options),) = voices.calls
        (ann,) = options.pop("known")
        assert ann.name == "Ann" and len(ann.samples) == 3 * SAMPLE_RATE
        assert options == {"min_speakers": 2, "max_speakers": 3}

    def test_nothing_is_told_before_it_is_known_who_speaks(self, start, echo, voices):
        transcriber, runtime = start(echo, ABLE)
        voices.go_on.clear()
        client = Client().send(transcriber, apart())
        transcriber.transcribe(request())  # others do not wait
        assert client.events == []
        client.handle.cancel()
        assert "cancelled" in str(client.error)
        voices.go_on.set()
        quiescent(transcriber, runtime)

    def test_an_error_ends_the_request_alone(self, start, echo, voices):
        transcriber, runtime = start(echo, ABLE)
        for error, expected in (
            (RequestError("the reference of 'Ann' has no speech"), RequestError),
            (ZeroDivisionError("a bug"), EarshotError),
        ):
            voices.error = error
            with pytest.raises(expected, match=str(error)):
                transcriber.transcribe(apart())
        quiescent(transcriber, runtime)

    def test_a_reference_that_is_no_audio_is_named(self, start, echo, voices):
        transcriber, _ = start(echo, ABLE)
        known = {"known_speaker_names": ("Ann",)}
        nothing = f"data:audio/wav;base64,{base64.b64encode(b'no sound').decode()}"
        long = base64.b64encode(encode(noise(11.0), "WAV", "PCM_16")).decode()
        for url, found in ((nothing, ""), (f"data:audio/wav;base64,{long}", "audio lasts 11.0 s")):
            with pytest.raises(RequestError, match=f"^the reference of Ann: {found}"):
                transcriber.transcribe(apart(**known, known_speaker_references=(url,)))
