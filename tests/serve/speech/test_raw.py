"""Raw samples: what media types say of them, and what of that is read."""

import io

import numpy as np
import pytest
import soundfile

from serve.contract.errors import AudioError
from serve.speech import raw
from tests.serve.speech.sounds import RATE, decode, tone


def encoded(subtype: str, endian: str, channels: int, rate: int) -> bytes:
    file = io.BytesIO()
    samples = np.repeat(tone(rate)[:, None], channels, axis=1)
    soundfile.write(file, samples, rate, format="RAW", subtype=subtype, endian=endian)
    return file.getvalue()


@pytest.mark.parametrize(
    ("media_type", "subtype", "endian", "channels", "rate"),
    [
        ("audio/L16; rate=16000", "PCM_16", "LITTLE", 1, 16_000),
        ("audio/l16;rate=24000;channels=2", "PCM_16", "LITTLE", 2, 24_000),
        ("audio/pcm; rate=8000", "PCM_16", "LITTLE", 1, 8_000),
        ("audio/L16; rate=16000; endianness=big-endian", "PCM_16", "BIG", 1, 16_000),
        ('audio/L16; rate="8000"; channels=2; endianness=big-endian', "PCM_16", "BIG", 2, 8_000),
        ("audio/PCMU; rate=8000", "ULAW", "LITTLE", 1, 8_000),
        ("audio/PCMA; rate=8000", "ALAW", "LITTLE", 1, 8_000),
    ],
)
def test_raw_samples_are_read_as_their_type_says(media_type, subtype, endian, channels, rate):
    whole = raw.with_header(encoded(subtype, endian, channels, rate), media_type)
    samples, _ = decode(whole)
    assert len(samples) == pytest.approx(3 * RATE, abs=1)
    assert np.argmax(np.abs(np.fft.rfft(samples[RATE : 2 * RATE]))) == 300
    assert np.abs(samples).max() == pytest.approx(0.5, rel=0.1)


def test_half_a_sample_at_the_end_is_left_out():
    data = encoded("PCM_16", "LITTLE", 1, RATE)
    samples, _ = decode(raw.with_header(data + b"x", "audio/L16;rate=16000"))
    assert len(samples) == 3 * RATE


@pytest.mark.parametrize(
    "media_type", ["", "audio/wav", "audio/L16", "audio/basic; rate=8000", "audio/pcm; channels=1"]
)
def test_other_types_are_of_files(media_type):
    assert raw.header(media_type, 100) == b""
    with pytest.raises(AudioError, match="expected a type such as audio/L16; rate=16000"):
        raw.with_header(b"abcd", media_type)


@pytest.mark.parametrize(
    ("media_type", "told"),
    [
        ("audio/L16; rate=16k", "rate = '16k'"),
        ("audio/L16; rate=16000; channels=0", "channels = '0'"),
        ("audio/L16; rate=16000; endianness=middle", "endianness = 'middle'"),
    ],
)
def test_types_that_make_no_sense_are_refused(media_type, told):
    with pytest.raises(AudioError, match=f"audio's type has {told}"):
        raw.header(media_type, 100)
