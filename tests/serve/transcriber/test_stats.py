"""Counters and what is derived from them."""

import dataclasses

import pytest

from serve.transcriber.stats import Counters


def test_ended_is_the_sum_of_the_outcomes():
    counters = Counters(accepted=100, ok=1, failed=10, cancelled=20, timed_out=40, rejected=5)
    assert counters.ended == 71


def test_rtfx_is_audio_for_each_busy_second():
    assert Counters(audio_s=30.0, busy_s=4.0).rtfx == 7.5
    assert Counters(audio_s=30.0).rtfx == 0.0, "nothing has run yet"


def test_plus_increases_the_named_counters_of_a_copy():
    before = Counters(ok=1, audio_s=2.0, failed=3)
    after = before.plus(ok=2, audio_s=0.5)
    assert after == Counters(ok=3, audio_s=2.5, failed=3)
    assert before == Counters(ok=1, audio_s=2.0, failed=3)


def test_counters_begin_at_zero_and_are_snapshots():
    counters = Counters()
    assert set(dataclasses.asdict(counters).values()) == {0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        counters.ok = 1
