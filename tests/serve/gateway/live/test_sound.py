"""Bytes of the wire as samples, and where speech is in them."""

import io
import itertools

import numpy as np
import pytest
import soundfile
import soxr

from serve.gateway.live.ear import Ear
from serve.gateway.live.settings import Format
from serve.gateway.live.sound import Inlet
from serve.speech.activity import FRAME, Options
from tests.serve.gateway.live.conftest import LoudIsSpeech

FORMATS = {
    Format("audio/pcm"): 24_000,
    Format("audio/pcm", 16_000): 16_000,
    Format("audio/pcmu"): 8_000,
    Format("audio/pcma"): 8_000,
}
SUBTYPES = {"audio/pcm": "PCM_16", "audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


@pytest.mark.parametrize(("format", "rate"), FORMATS.items())
def test_every_format_gives_the_samples_that_were_written(format, rate):
    tone = np.sin(np.arange(16_000) * 2 * np.pi * 440 / 16_000).astype(np.float32) * 0.5
    file = io.BytesIO()
    wire = soxr.resample(tone, 16_000, rate)
    soundfile.write(file, wire, rate, format="RAW", subtype=SUBTYPES[format.type])
    data, inlet = file.getvalue(), Inlet(format)
    assert len(data) == inlet.bytes_per_s
    step = 241
    pieces = [inlet.samples(data[i : i + step]) for i in range(0, len(data), step)]
    found = np.concatenate([*pieces, inlet.rest()])
    assert len(found) == len(tone)
    assert np.abs(found - tone)[100:-100].max() < 0.02
    assert len(inlet.samples(data)) > 14_000, "it can be used again"


def test_half_a_sample_waits_for_its_other_half_and_a_clear_forgets_it():
    data = (np.arange(2000) * 7 % 3000).astype("<i2").tobytes()
    whole = Inlet(Format("audio/pcm", 16_000)).samples(data)
    inlet = Inlet(Format("audio/pcm", 16_000))
    cuts = [0, 1, 2, 3, 1000, 1001, 2999, len(data)]
    pieces = [inlet.samples(data[a:b]) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), whole)
    inlet.samples(b"\x7f")
    inlet.rest()
    inlet.clear()
    assert np.abs(inlet.samples(data) - whole).max() < 1e-6


def test_speech_begins_and_ends_and_a_pause_is_no_end():
    ear = Ear(LoudIsSpeech(), Options(0.5, 4 * FRAME, 0))
    loud, quiet = np.ones(FRAME, np.float32), np.zeros(FRAME, np.float32)
    plan = [quiet, *[loud] * 2, *[quiet] * 4, loud, *[quiet] * 6]
    audio = np.concatenate(plan)
    frames = [frame for i in range(0, len(audio), 700) for frame in ear.push(audio[i : i + 700])]
    assert [frame.speech for frame in frames] == [block is loud for block in plan]
    assert [i for i, frame in enumerate(frames) if frame.ends] == [12]
    assert not len(ear.rest())


def test_what_is_no_whole_frame_is_kept_and_can_be_taken():
    ear = Ear(LoudIsSpeech(), Options())
    assert list(ear.push(np.ones(100, np.float32))) == []
    assert len(ear.rest()) == 100 and not len(ear.rest())
