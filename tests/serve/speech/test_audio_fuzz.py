"""Damaged files of every format: samples within the limits or an AudioError, and nothing else.

The mutations are those of a careless or a hostile sender: bytes flipped, sizes changed, pieces
cut, repeated, moved and put into another file. The examples are the same in each run.
"""

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.errors import AudioError
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import AudioLimits
from tests.marks import nightly
from tests.serve.speech.sounds import FFMPEG, PHONES, SNDFILE, recording, wide_amr

LIMITS = AudioLimits(max_s=5.0, max_values=2e6, max_cpu_s=1.0)
SHORT_S = 0.25
SIZES = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
NAMES = (*SNDFILE, *FFMPEG, *PHONES, "amr-wb")


def valid(name: str) -> bytes:
    """A small file that can be decoded."""
    return wide_amr() if name == "amr-wb" else recording(name, SHORT_S)


def place(share: float, size: int) -> int:
    return min(int(share * size), size - 1)


def mutated(data: bytearray, what: str, at: float, number: int) -> bytearray:
    """One mutation at a share of the file's length; headers stand at its beginning."""
    i, length = place(at, len(data)), 1 + number % 64
    if what == "flip":
        data[i] ^= 1 << number % 8
    elif what == "set":
        data[i] = number % 256
    elif what == "size":
        order = "<>"[number % 2]
        data[i : i + 4] = struct.pack(f"{order}I", SIZES[number % len(SIZES)])
    elif what == "cut":
        del data[i:]
    elif what == "drop":
        del data[i : i + length]
    elif what == "repeat":
        data[i:i] = data[i : i + length] * (1 + number % 300)
    elif what == "move":
        piece = data[i : i + length]
        del data[i : i + length]
        data += piece
    else:
        data[i:i] = valid(NAMES[number % len(NAMES)])[: 8 * length]
    return data or bytearray(1)


# Half of the places in the first tenth, where headers are.
PLACES = st.one_of(st.floats(0, 0.1), st.floats(0, 1))
KINDS = st.sampled_from(("flip", "set", "size", "cut", "drop", "repeat", "move", "splice"))
MUTATIONS = st.lists(st.tuples(KINDS, PLACES, st.integers(0, 2**16)), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("name", "examples"),
    [*((name, 4) for name in NAMES[::4]), *nightly(*((name, 100) for name in NAMES))],
)
def test_a_damaged_file_gives_samples_or_an_audio_error(name: str, examples: int):
    """The whole file is tried first: a seed that cannot be decoded would test nothing."""
    assert len(audio.join_blocks(audio.decode(valid(name), LIMITS)))
    ended = {"samples": 0, "error": 0}

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(MUTATIONS)
    def check(mutations: list[tuple[str, float, int]]) -> None:
        data = bytearray(valid(name))
        for what, at, number in mutations:
            data = mutated(data, what, at, number)
        count = 0
        limits = dataclasses.replace(LIMITS, partial=len(mutations) % 2 == 0)
        try:
            for block in audio.decode(bytes(data), limits):
                count += len(block)
                assert block.dtype == np.float32
                assert block.ndim == 1
                assert len(block)
                assert np.abs(block).max() <= 1.0, "NaN or beyond 1"
                # One block may pass the limit of the file's own rate by the resampler's rounding.
                assert count <= LIMITS.max_s * SAMPLE_RATE + 1
        except AudioError as error:
            ended["error"] += 1
            assert str(error).startswith(("audio", "decoding the audio", "the file has no audio"))
        else:
            ended["samples"] += 1
            assert count

    check()
    assert ended["error"] or examples < 10, "no mutation did any harm"
