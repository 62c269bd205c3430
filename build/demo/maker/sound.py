"""Small things done to one utterance's samples on the CPU: resampling, trimming, finding pauses.

Samples are float32 (n,) in [-1, 1].
"""

import io

import numpy as np
import soundfile
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
_FRAME = 160
_QUIET = 0.02
_PAUSE_FRAMES = 10
_KEEP_FRAMES = 1

Samples = NDArray[np.float32]


def read_wav(data: bytes) -> tuple[Samples, int]:
    """Mono samples and rate of a WAV file, whose header may declare more than there is (a pipe's).

    libsndfile corrects such a length.
    """
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate


def resample(samples: Samples, ratio: float) -> Samples:
    """Change the number of samples by `ratio`, band-limited, through the spectrum."""
    size = -(-max(samples.size, 1) // 2000) * 2000
    wanted = round(size * ratio / 2) * 2
    if wanted == size:
        return samples
    spectrum = np.fft.rfft(samples, size)
    kept = np.zeros(wanted // 2 + 1, dtype=spectrum.dtype)
    common = min(kept.size, spectrum.size)
    kept[:common] = spectrum[:common]
    out = np.fft.irfft(kept, wanted) * (wanted / size)
    return out[: round(samples.size * ratio)].astype(np.float32)


def _loud_frames(samples: Samples) -> NDArray[np.bool_]:
    frames = samples[: samples.size // _FRAME * _FRAME].reshape(-1, _FRAME)
    levels = np.sqrt(np.mean(np.square(frames), axis=1))
    top = float(np.percentile(levels, 95)) if levels.size else 0.0
    return np.asarray(levels > max(top * _QUIET, 1e-4))


def trim(samples: Samples) -> Samples:
    """Cut the silence before and after speech, to within 10 ms."""
    loud = np.flatnonzero(_loud_frames(samples))
    if loud.size == 0:
        return samples[:0]
    first, last = max(int(loud[0]) - _KEEP_FRAMES, 0), int(loud[-1]) + 1 + _KEEP_FRAMES
    return samples[first * _FRAME : last * _FRAME]


def pauses(samples: Samples) -> list[tuple[int, int]]:
    """Quiet stretches of at least 100 ms inside the samples, as sample ranges."""
    loud = np.concatenate([[True], _loud_frames(samples), [True]])
    edges = np.flatnonzero(np.diff(loud.astype(np.int8)))
    runs = edges.reshape(-1, 2)
    return [
        (int(start) * _FRAME, int(end) * _FRAME)
        for start, end in runs
        if end - start >= _PAUSE_FRAMES
    ]
