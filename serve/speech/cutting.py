"""Audio cut into windows at quiet places, without a model.

OpenAI decodes a recording from left to right and moves on to the last timestamp that it saw, so its
windows depend on each other. Here they are cut beforehand, so they can decode at the same time; see
`serve.speech.coverage` for speech of which there is no text.

Every window but the last ends between 15 s and 30 s after it began, in the longest pause found
there. Loudness is the power of 20 ms frames averaged over 0.3 s, so that a gap inside a word or
between two words does not look like a pause. Frames within 6 dB of the quietest count as pause,
which finds pauses in clean recordings and in noisy ones alike; more than 40 dB below the loudest
all are equally quiet, so that digital silence does not beat a pause with room noise. Pauses of 1 s
and more are equally good and the latest wins, since a window costs the same whatever it holds. The
cut is in the middle of a pause, or half a second before the speech that ends a long one. Speech
without any pause is cut at its quietest place.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.windows import Window

_EARLIEST_CUT = WINDOW_SAMPLES // 2
_SHORTEST_REST = SAMPLE_RATE  # samples; a last window of less holds too little to recognise
_SURE_SAMPLES = WINDOW_SAMPLES + _SHORTEST_REST  # with so many, what follows moves no cut
_FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_SMOOTH_FRAMES = 15  # 0.3 s
_PAUSE_DB = 6.0  # above the quietest frame
_DEEPEST_DB = 40.0  # below the loudest frame
_SILENCE = 1e-12  # mean square of samples: below the last bit of 24
_LONG_PAUSE_FRAMES = 50  # 1 s


def cut(blocks: Iterable[Samples]) -> Iterator[Window]:
    """Cut audio into windows of at most 30 s that join up to exactly the whole.

    A window is yielded as soon as it is known, and where it ends does not depend on how the audio
    is split into blocks. A last window is never shorter than 1 s unless it is the only one.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
    """
    cutter = Cutter()
    for block in blocks:
        yield from cutter.push(block)
    yield from cutter.finish()


class Cutter:
    """Cuts audio that comes in blocks; see `cut`."""

    def __init__(self) -> None:
        self._start = 0  # of what is held, in the whole audio
        self._held = [np.zeros(0, np.float32)]
        self._count = 0  # samples held

    def push(self, block: Samples) -> Iterator[Window]:
        """Take one more block, and yield the windows that are known then."""
        self._held.append(block)
        self._count += len(block)
        if self._count >= _SURE_SAMPLES:
            yield from self._cut(_SURE_SAMPLES)

    def finish(self) -> Iterator[Window]:
        """Yield the windows that are left."""
        yield from self._cut(WINDOW_SAMPLES + 1)
        yield Window(self._start / SAMPLE_RATE, self._held[0], last=True)

    def _cut(self, enough: int) -> Iterator[Window]:
        """Yield windows, as long as so many samples are held."""
        rest = np.concatenate(self._held)
        self._held, self._count = [rest], len(rest)
        while len(rest) >= enough:
            end = _first_cut(rest)
            window = Window(self._start / SAMPLE_RATE, rest[:end].copy())
            self._start, rest = self._start + end, rest[end:]
            self._held, self._count = [rest], len(rest)
            yield window


def _first_cut(samples: Samples) -> int:
    """Return where the first window of more than 30 s of audio ends; 31 s of it suffice."""
    latest = min(WINDOW_SAMPLES, len(samples) - _SHORTEST_REST)
    return _EARLIEST_CUT + _quiet_place(samples[_EARLIEST_CUT:latest])


def _quiet_place(region: Samples) -> int:
    """Return the index of the best sample to cut at; region is (n,), at least a second."""
    frames = region[: len(region) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
    # Edges repeat their last frame, or a window's end would look quieter than it is.
    half = _SMOOTH_FRAMES // 2
    padded = np.pad(power, half, mode="edge")
    smooth = np.convolve(padded, np.full(_SMOOTH_FRAMES, 1.0 / _SMOOTH_FRAMES), mode="valid")
    level_db = 10.0 * np.log10(np.maximum(smooth, _SILENCE))
    level_db = np.maximum(level_db, level_db.max() - _DEEPEST_DB)
    margin_db = min(_PAUSE_DB, (level_db.max() - level_db.min()) / 3)
    begin, end = _longest_pause(level_db <= level_db.min() + margin_db)
    # The middle, but never more than half a second before speech begins again.
    frames_before_speech = min((end - begin) / 2, _LONG_PAUSE_FRAMES / 2)
    return int((end - frames_before_speech) * _FRAME)


def _longest_pause(quiet: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first frame, and the one after the last, of the longest run of quiet ones.

    Runs of a second and more are equally long; of equals the last is taken.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], quiet, [False]))))
    runs = edges.reshape(-1, 2)
    lengths = np.minimum(runs[:, 1] - runs[:, 0], _LONG_PAUSE_FRAMES)
    best = len(runs) - 1 - int(np.argmax(lengths[::-1]))  # argmax finds the first of equals
    return int(runs[best, 0]), int(runs[best, 1])
