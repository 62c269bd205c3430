"""Cut audio into windows at quiet places, without a model.

OpenAI decodes a recording from left to right and continues at the last timestamp, so its windows
depend on each other. Here windows are cut in advance, so that they decode in parallel. See
`serve.speech.coverage` for speech without text.

Every window but the last ends 15 s to 30 s after its start, in the longest pause of that range:
- Loudness is the power of 20 ms frames averaged over 0.3 s, so that a gap within or between words
  does not look like a pause.
- Frames within 6 dB of the quietest one count as pause. This works for clean and noisy recordings.
- Frames more than 40 dB below the loudest one are equally quiet, so that digital silence has no
  advantage over a pause with room noise.
- Pauses of 1 s and more are equally good, and the latest wins, because a window costs the same
  whatever its length.
- The cut is in the middle of a pause, or half a second before the speech after a long one. Speech
  without a pause is cut at its quietest place.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Samples
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.windows import AudioWindow

_EARLIEST_CUT = WINDOW_SAMPLES // 2
_SHORTEST_REST = SAMPLE_RATE  # minimum samples of the last window; fewer are not recognisable
_SURE_SAMPLES = WINDOW_SAMPLES + _SHORTEST_REST  # audio after these samples changes no cut
_FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_SMOOTH_FRAMES = 15  # 0.3 s
_PAUSE_DB = 6.0  # above the quietest frame
_DEEPEST_DB = 40.0  # below the loudest frame
_SILENCE = 1e-12  # mean square, below the last bit of 24-bit samples
_LONG_PAUSE_FRAMES = 50  # 1 s


def cut(blocks: Iterable[Samples]) -> Iterator[AudioWindow]:
    """Cut audio into adjacent windows of at most 30 s.

    A window is yielded as soon as its end is certain. The cuts do not depend on how the audio is
    split into blocks. The last window has at least 1 s unless it is the only one.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
    """
    cutter = Cutter()
    for block in blocks:
        yield from cutter.push(block)
    yield from cutter.finish()


class Cutter:
    """A buffer that cuts blocks into windows; see `cut`."""

    def __init__(self) -> None:
        self._start = 0  # index of the first held sample in the recording
        self._held = [np.zeros(0, np.float32)]
        self._count = 0  # samples held

    def push(self, block: Samples) -> Iterator[AudioWindow]:
        """Add a block, and yield the windows that are certain now."""
        self._held.append(block)
        self._count += len(block)
        if self._count >= _SURE_SAMPLES:
            yield from self._cut(_SURE_SAMPLES)

    def finish(self) -> Iterator[AudioWindow]:
        """Yield the remaining windows."""
        yield from self._cut(WINDOW_SAMPLES + 1)
        yield AudioWindow(self._start / SAMPLE_RATE, self._held[0], last=True)

    def _cut(self, enough: int) -> Iterator[AudioWindow]:
        """Yield windows while at least `enough` samples are held."""
        rest = np.concatenate(self._held)
        self._held, self._count = [rest], len(rest)
        while len(rest) >= enough:
            end = _first_cut(rest)
            window = AudioWindow(self._start / SAMPLE_RATE, rest[:end].copy())
            self._start, rest = self._start + end, rest[end:]
            self._held, self._count = [rest], len(rest)
            yield window


def _first_cut(samples: Samples) -> int:
    """Return the end of the first window of more than 30 s of samples; it depends on 31 s."""
    latest = min(WINDOW_SAMPLES, len(samples) - _SHORTEST_REST)
    return _EARLIEST_CUT + _quiet_place(samples[_EARLIEST_CUT:latest])


def _quiet_place(region: Samples) -> int:
    """Return the index of the best sample to cut at; region is (n,), at least a second."""
    frames = region[: len(region) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
    # Repeat the edge frames; zeros would make the edges look quieter than they are.
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
    """Return the first frame of the longest quiet run, and the frame after its last one.

    Runs of a second and more count as equally long; the last one wins among equals.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], quiet, [False]))))
    runs = edges.reshape(-1, 2)
    lengths = np.minimum(runs[:, 1] - runs[:, 0], _LONG_PAUSE_FRAMES)
    best = len(runs) - 1 - int(np.argmax(lengths[::-1]))  # argmax returns the first maximum
    return int(runs[best, 0]), int(runs[best, 1])
