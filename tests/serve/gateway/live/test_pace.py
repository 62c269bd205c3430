"""How often an utterance is decoded."""

import pytest

from serve.gateway.live.pace import Pace


@pytest.fixture
def pace():
    return Pace(0.5)


def test_quick_decodings_begin_at_the_pace_that_is_configured(pace):
    assert pace.due_s < 0
    pace.speech(10.0)
    assert pace.due_s == 10.5
    pace.began(10.5)
    pace.ended(10.6, 9)
    assert pace.due_s == 11.0
    pace.speech(10.7)  # after a short pause
    assert pace.due_s == 11.2


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


def test_a_pace_may_change(pace):
    pace.tune(1.5)
    pace.began(10.0)
    pace.ended(10.1, 1)
    assert pace.due_s == 11.5


def test_what_failed_is_tried_again_later_and_later(pace):
    pace.failed(10.0, 1)
    assert pace.due_s == 10.5
    pace.failed(10.6, 2)
    assert pace.due_s == 11.6
