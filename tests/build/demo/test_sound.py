"""What is done to one utterance's samples."""

import struct

import numpy as np
import pytest

from build.demo.maker.sound import read_wav
from build.demo.maker.synth import write_wav

PCM = np.array([0, 1, -1, 32767, -32768, 12345], np.int16)


@pytest.mark.parametrize("declared", [2 * PCM.size, 0x7FFFF000], ids=["file", "pipe"])
def test_wav_is_read_as_written_whatever_length_a_pipe_declares(tmp_path, declared):
    """espeak-ng declares 0x7ffff000 bytes where it writes to a pipe."""
    write_wav(tmp_path / "a.wav", PCM, 22_050)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    assert (data[36:40], len(data)) == (b"data", 44 + 2 * PCM.size)
    struct.pack_into("<I", data, 4, declared + 36)
    struct.pack_into("<I", data, 40, declared)
    samples, rate = read_wav(bytes(data))
    assert (rate, samples.dtype) == (22_050, np.float32)
    np.testing.assert_array_equal(samples, PCM / np.float32(32768))
