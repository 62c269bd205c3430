"""What is decoded of an utterance, and what of it is told."""

import dataclasses

import numpy as np
import pytest

from serve.contract.messages import Segment, Timings, Transcript, Word
from serve.contract.server_config import LiveConfig
from serve.gateway.kserve.messages import request_parts
from serve.gateway.live.session import UpdatePacer
from serve.gateway.live.settings import Transcription
from serve.gateway.live.utterance import LiveUtterance
from serve.speech.rate import SAMPLE_RATE

TIMINGS = Timings(0.0, 0.0, 0.0, 0.0)


def spoken(item, start_s, seconds, language="en"):
    """An utterance of so much speech."""
    utterance = LiveUtterance(item, round(start_s * SAMPLE_RATE), Transcription(language=language))
    utterance.add(np.full(round(seconds * SAMPLE_RATE), 0.1, np.float32), speech=True)
    return utterance


def hear(utterance, text, language="en"):
    """Decode it: a word takes half a second; returns the window and what became final."""
    words = [Word(i / 2, i / 2 + 0.4, f" {word}", 0.9) for i, word in enumerate(text.split())]
    window = utterance.window()
    segment = Segment(0.0, 9.0, text, (), None, None, 0.0, 1.0, tuple(words))
    transcript = Transcript(text, language, None, 9.0, (segment,), TIMINGS)
    told = utterance.take(window, transcript, 24.0)
    return window, told.text


def finished(text, **given):
    """The utterance before."""
    utterance = spoken("first", 1.0, len(text.split()) / 2, **given)
    _, told = hear(utterance, text)
    assert told + utterance.finish().text == text
    return utterance


def test_once_its_language_is_found_there_is_no_choice():
    utterance = LiveUtterance("first", 0, Transcription(languages=("en", "de")))
    utterance.add(np.full(3 * SAMPLE_RATE, 0.1, np.float32), speech=True)
    window, _ = hear(utterance, "It rains all day")
    assert (window.options.language, window.options.languages) == (None, ("en", "de"))
    assert (utterance.window().options.language, utterance.window().options.languages) == ("en", ())


@pytest.mark.parametrize("named", [None, "zh"])
def test_all_of_a_chinese_utterance_has_the_script_of_its_first_final_text(named):
    utterance = LiveUtterance("first", 0, Transcription(language=named))
    utterance.add(np.full(2 * SAMPLE_RATE, 0.1, np.float32), speech=True)
    hear(utterance, "OK OK OK", "zh")
    assert utterance.window().options.language == "zh"
    hear(utterance, "OK OK OK 這個 國家", "zh")
    hear(utterance, "OK OK OK 這個 國家", "zh")
    assert utterance.window().options.language == "zh-Hant"
    told = LiveUtterance("second", 0, Transcription(language="zh-CN"))
    told.add(np.full(2 * SAMPLE_RATE, 0.1, np.float32), speech=True)
    hear(told, "这个 国家 OK OK", "zh")
    assert told.window().options.language == "zh-CN"


def test_a_word_with_enough_audio_behind_it_is_final_by_one_hypothesis():
    utterance = spoken("first", 0.0, 2.25)  # words end at 0.4, 0.9, 1.4 and 1.9
    assert hear(utterance, "It rains all day")[1] == "It rains"
    assert hear(utterance, "It rains at night")[1] == ""
    assert hear(utterance, "It rains at noon")[1] == " at"


@pytest.mark.parametrize(("chosen", "asked"), [("auto", None), ("on", True), ("off", False)])
def test_how_much_the_encoder_sees_is_left_to_the_engine_or_asked_for(chosen, asked):
    chosen = LiveConfig(short_encoder=chosen).asks_short_encoder
    utterance = LiveUtterance("first", 0, Transcription(), chosen)
    assert utterance.window().options.short_encoder is asked


def test_a_window_tells_where_somebody_speaks_in_it():
    utterance = LiveUtterance("first", 5 * SAMPLE_RATE, Transcription())
    for speech in (False, True, True, False, True):
        utterance.add(np.zeros(SAMPLE_RATE, np.float32), speech)
    assert utterance.window().options.voice == (1.0, 3.0, 4.0, 5.0)
    hear(utterance, "a b c. d e f g h i")
    utterance.take(utterance.window(), Transcript("", "en", None, 5.0, (), TIMINGS), 4.0)
    window = utterance.window()
    assert window.begin == pytest.approx(6.45 * SAMPLE_RATE, abs=1)
    assert window.options.voice == pytest.approx((0.0, 1.55, 2.55, 3.55), abs=1e-3)


def test_a_windows_audio_is_sent_as_it_lies_in_memory():
    utterance = LiveUtterance("first", 0, Transcription())
    for level in (0.0, 0.1, 0.2):
        utterance.add(np.full(512, level, np.float32), speech=True)
        window = utterance.window()
    parts = request_parts(window.options, samples=window.audio)
    audio = np.concatenate(window.audio)
    whole = request_parts(dataclasses.replace(window.options, audio=audio))
    assert b"".join(parts) == b"".join(whole)
    views = [np.frombuffer(part, np.float32) for part in parts if len(part) == 4 * 512]
    assert [np.shares_memory(*pair) for pair in zip(views, window.audio, strict=True)] == [True] * 3


def test_so_it_does_of_what_was_said_before():
    before, utterance = finished("It rains."), spoken("second", 5.0, 1.0)
    before.add(np.zeros(SAMPLE_RATE, np.float32), speech=False)
    utterance.prepend(before, 24.0)
    assert utterance.window().options.voice == (0.0, 1.0, 2.0, 3.0)


def test_what_was_said_before_is_heard_again_and_not_told_again():
    before, utterance = finished("It rains."), spoken("second", 5.0, 1.0)
    utterance.prepend(before, 24.0)
    window, _ = hear(utterance, "It rains. We stay in")
    assert window.duration_s == 2.0 and window.end == 6 * SAMPLE_RATE
    _, told = hear(utterance, "It rains! We stay")
    assert told == "We" and utterance.finish().text == " stay"
    assert utterance.text == "We stay" and utterance.duration_s == 1.0


def test_of_much_that_was_said_before_the_last_sentence_is_heard_again():
    before = finished("a b c d e f g h i j k l m n " * 3 + "so. It rains all day")
    utterance = spoken("second", 20.0, 1.0)
    utterance.prepend(before, 24.0)
    assert utterance.window().duration_s == pytest.approx(3.05)
    assert utterance.window().options.prompt.endswith("m n so.")


@pytest.mark.parametrize(
    ("before", "language"),
    [("It rains.", None), ("It rains.", "es"), (" ".join(["on"] * 46), "en")],
)
def test_alone_where_the_language_may_be_another_one_or_there_is_no_place_to_cut(before, language):
    utterance = spoken("second", 20.0, 1.0, language)
    first = finished(before)
    first.agreement.words[:-1] = []
    utterance.prepend(first, 24.0)
    assert utterance.window().duration_s == 1.0


@pytest.fixture
def pace():
    return UpdatePacer(0.5)


def test_quick_decodings_begin_at_the_pace_that_is_configured(pace):
    assert pace.due_s < 0
    pace.speech(10.0)
    assert pace.due_s == 10.5
    pace.began(10.5)
    pace.ended(10.6, 9)
    assert pace.due_s == 11.0
    pace.speech(10.7)  # after a short pause
    assert pace.due_s == 11.2
    pace.update_s = 1.5
    pace.began(11.2)
    pace.ended(11.3, 1)
    assert pace.due_s == 12.7


def test_slow_ones_rest_the_longer_the_more_streams_there_are(pace):
    def due_s(streams):
        pace.began(10.0)
        pace.ended(10.75, streams)
        return pace.due_s

    assert due_s(1) == 10.75
    assert due_s(2) == 11.125
    assert 11.25 < due_s(4) < due_s(100) < 11.5


def test_quick_decodings_get_more_audio_and_slow_ones_less(pace):
    def decode(took_s, times=1):
        for _ in range(times):
            pace.began(10.0)
            pace.ended(10.0 + took_s, 1)
        return pace.hold_s

    assert pace.hold_s == 9.0
    assert decode(0.1) == 10.0
    assert decode(0.3, 30) == 24.0
    assert decode(0.5) == pytest.approx(19.2)
    assert decode(0.5, 9) == 9.0


def test_what_failed_is_tried_again_later_and_later(pace):
    pace.failed(10.0)
    assert pace.due_s == 10.5
    pace.failed(10.6)
    assert pace.due_s == 11.6
