"""Bytes of the wire as samples, and where speech is in them."""

import asyncio
import io
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
import soxr

from serve.contract.messages import SpeechOptions
from serve.gateway.live.hearing import Hearing
from serve.gateway.live.settings import Format
from serve.speech.vad import FRAME
from tests.serve.gateway.live.sessions import LoudIsSpeech

FORMATS = {
    Format("audio/pcm"): 24_000,
    Format("audio/pcm", 16_000): 16_000,
    Format("audio/pcmu"): 8_000,
    Format("audio/pcma"): 8_000,
}
PCM_16K = Format("audio/pcm", 16_000)
SUBTYPES = {"audio/pcm": "PCM_16", "audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


@pytest.mark.parametrize(("format", "rate"), FORMATS.items())
def test_every_format_gives_the_samples_that_were_written(format, rate):
    tone = np.sin(np.arange(16_000) * 2 * np.pi * 440 / 16_000).astype(np.float32) * 0.5
    file = io.BytesIO()
    wire = soxr.resample(tone, 16_000, rate)
    soundfile.write(file, wire, rate, format="RAW", subtype=SUBTYPES[format.type])
    data, step = file.getvalue(), 241

    async def listen():
        with ThreadPoolExecutor(1) as pool:
            hearing = Hearing(format, SpeechOptions(), LoudIsSpeech(), pool)
            assert len(data) == hearing.bytes_per_s
            blocks = [await hearing.hear(data[i : i + step]) for i in range(0, len(data), step)]
            blocks.append(await hearing.flush(end=True))
            rest = hearing.take_partial_frame()
            assert len(await hearing.hear(data)) > 25, "it can be used again"
            return [*(frame.samples for frame in itertools.chain(*blocks)), rest]

    found = np.concatenate(asyncio.run(listen()))
    assert len(found) == len(tone)
    assert np.abs(found - tone)[100:-100].max() < 0.02


def hear(pieces, detector=None, options=None, clear_at=None):
    """The frames of a stream of 16 kHz, block by block, and the samples that are left over."""

    async def listen():
        with ThreadPoolExecutor(1, "hearing") as pool:
            hearing = Hearing(PCM_16K, options or SpeechOptions(), detector or LoudIsSpeech(), pool)
            blocks = []
            for index, piece in enumerate(pieces):
                if index == clear_at:
                    hearing.clear()
                blocks.append(await hearing.hear(piece))
            blocks.append(await hearing.flush())
            return blocks, [len(hearing.take_partial_frame()) for _ in range(2)]

    return asyncio.run(listen())


def pcm(samples):
    return (samples * 16_000).astype("<i2").tobytes()


def test_half_a_sample_waits_for_its_other_half_and_a_clear_forgets_it():
    data = (np.arange(8 * FRAME) * 7 % 3000).astype("<i2").tobytes()
    cuts = [0, 1, 2, 3, 1000, 1001, 2999, len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    found = []
    for blocks, _ in (hear([data]), hear(pieces), hear([b"\x7f", data], clear_at=1)):
        found.append(np.concatenate([frame.samples for frame in itertools.chain(*blocks)]))
    assert len(found[0]) > 6 * FRAME
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("size", [100, 320, 700, 1600, 8000])
def test_speech_begins_and_ends_and_a_pause_is_no_end(size):
    loud, quiet = np.ones(FRAME, np.float32), np.zeros(FRAME, np.float32)
    plan = [quiet, *[loud] * 2, *[quiet] * 4, loud, *[quiet] * 6]
    audio = np.concatenate(plan)
    pieces = [pcm(audio[i : i + size]) for i in range(0, len(audio), size)]
    blocks, rests = hear(pieces, options=SpeechOptions(vad_min_silence_s=4 * FRAME / 16_000))
    frames = list(itertools.chain(*blocks))
    assert [frame.speech for frame in frames] == [block is loud for block in plan]
    assert [i for i, frame in enumerate(frames) if frame.ends] == [12]
    assert rests == [0, 0]


def test_speech_is_detected_in_threads_in_blocks_of_at_least_96_ms():
    threads, sizes = set(), []

    class Noted(LoudIsSpeech):
        def probabilities(self, samples):
            threads.add(threading.current_thread().name)
            sizes.append(len(samples) // FRAME)
            return super().probabilities(samples)

    hear([pcm(np.ones(320))] * 50, Noted())
    assert threads == {"hearing_0"}
    assert sum(sizes) == 320 * 50 // FRAME and min(sizes[:-1]) >= 3


def test_what_is_no_whole_frame_is_kept_and_can_be_taken():
    assert hear([pcm(np.ones(100))]) == ([[], []], [100, 0])
