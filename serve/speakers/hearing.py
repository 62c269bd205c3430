"""What the two networks hear in a recording: pieces of speech of one speaker, and their voices.

Windows of 10 s overlap a little, so that each frame is judged by a window that knows what is around
it. The speech of one of a window's speakers falls into pieces where it pauses, for the network may
take people who follow each other for one; each piece has a vector of its own.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from serve.contract.messages import Samples
from serve.speakers.clusters import Vectors, unit
from serve.speakers.embedding import SIZE, Embedding
from serve.speakers.fbank import FRAME, fbank
from serve.speakers.fbank import HOP as FBANK_HOP
from serve.speakers.segmentation import FRAMES, HOP, OFFSET, SAMPLES, SPEAKERS, Segmentation
from serve.speech.rate import SAMPLE_RATE

SEGMENTATION = Path(__file__).parent / "pyannote" / "segmentation-3.0.safetensors"
EMBEDDING = Path(__file__).parent / "campplus" / "campplus_cn_en_common.safetensors"

_BATCH = 16  # windows at a time
_BUCKET = 50  # frames of features: a vector is made of a multiple of so many

_Network = TypeVar("_Network", Segmentation, Embedding)
Active = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Listening:
    """How the networks are asked; chosen by measurement, see `python -m eval speakers`."""

    margin: int = 59  # frames at either end of a window that another judges: 1 s
    active: float = 0.45  # from this probability on, a speaker speaks in a frame,
    quiet_s: float = 0.35  # but not in so long a stretch of frames of which each is
    floor_db: float = 5.0  # less than so much above the quietest twentieth of its window
    below_db: float = 20.0  # and more than so much below the loudest
    pause_s: float = 0.3  # a longer one ends a piece
    piece_s: float = 2.0  # and so does so much speech, at the next pause
    most_s: float = 4.0  # a piece has no more
    alone_s: float = 0.5  # with less, a vector is made of speech during others', too
    least_s: float = 0.15  # with less speech, a piece is none

    @property
    def step(self) -> int:
        """Frames from a window to the next."""
        return FRAMES - 2 * self.margin


Span = tuple[int, int]
"""A frame of the recording, and the one after the last."""


@dataclasses.dataclass(frozen=True, eq=False)
class Heard:
    """What the networks say of a recording: m pieces of speech, in order of windows."""

    seconds: float
    spans: tuple[tuple[Span, ...], ...]  # of each piece
    speech_s: npt.NDArray[np.float32]  # (m,), behind each vector
    vectors: Vectors  # (m, SIZE), of length 1


class Ear:
    """Both networks on a device; any number of threads may ask it.

    Args:
        device: where they compute.
        listening: how they are asked.
    """

    def __init__(self, device: torch.device, listening: Listening) -> None:
        self._device, self._listening = device, listening
        self._segmentation = _load(Segmentation(), SEGMENTATION, device)
        self._embedding = _load(Embedding(), EMBEDDING, device)

    @torch.inference_mode()
    def hear(self, blocks: Iterable[Samples]) -> Heard:
        """Listen to a recording of blocks of samples; holds some windows of it at a time."""
        step = self._listening.step
        spans, speech_s = list[tuple[Span, ...]](), list[float]()
        vectors, count, seconds = [np.zeros((0, SIZE), np.float32)], 0, 0.0
        for batch, samples, last in _batches(blocks, step * HOP):
            windows = torch.from_numpy(batch).to(self._device)
            active = self._segmentation.activity(windows).cpu().numpy() >= self._listening.active
            self._leave_out_pauses(active, _levels(windows).cpu().numpy())
            active[int(count == 0) :, : self._listening.margin] = False
            active[: len(active) - last, FRAMES - self._listening.margin :] = False
            voices = list[Tensor]()
            for index in np.flatnonzero(active.any((1, 2))):
                features, window = fbank(windows[index]), count + int(index)
                for speaker, piece in self._pieces(active[index]):
                    own = _features_of(self._own(active[index], speaker, piece))
                    voices.append(features[torch.from_numpy(own).to(self._device)])
                    spans.append(tuple((a + window * step, b + window * step) for a, b in piece))
                    speech_s.append(len(own) * FBANK_HOP / SAMPLE_RATE)
            vectors.append(self._vectors(voices))
            count, seconds = count + len(batch), samples / SAMPLE_RATE
        return Heard(
            seconds,
            tuple(spans),
            np.asarray(speech_s, np.float32),
            unit(np.concatenate(vectors)),
        )

    def _leave_out_pauses(self, active: Active, levels: npt.NDArray[np.float32]) -> None:
        """Let nobody be active, (n, FRAMES, SPEAKERS), where it is quiet by levels, (n, FRAMES).

        The network speaks on through pauses of up to a second, of people who read word by word.
        """
        floor, loud = np.quantile(levels, (0.05, 0.95), axis=1)
        limits = np.minimum(floor + self._listening.floor_db, loud - self._listening.below_db)
        least = self._listening.quiet_s * SAMPLE_RATE / HOP
        for window, quiet in enumerate(levels < limits[:, None]):
            for start, end in runs(quiet):
                if end - start >= least:
                    active[window, start:end] = False

    def _pieces(self, active: Active) -> Iterator[tuple[int, list[Span]]]:
        """The pieces of a window, (FRAMES, SPEAKERS), each with its speaker."""
        pause, enough, most, least = (
            seconds * SAMPLE_RATE / HOP
            for seconds in (
                *(self._listening.pause_s, self._listening.piece_s),
                *(self._listening.most_s, self._listening.least_s),
            )
        )
        for speaker in range(SPEAKERS):
            piece = list[Span]()
            for run in runs(active[:, speaker]):
                for start, end in _parts(run, most):
                    length = sum(b - a for a, b in piece)
                    if piece and (start - piece[-1][1] > pause or length >= enough):
                        if length >= least:
                            yield speaker, piece
                        piece = []
                    piece.append((start, end))
            if sum(b - a for a, b in piece) >= least:
                yield speaker, piece

    def _own(self, active: Active, speaker: int, piece: Sequence[Span]) -> Active:
        """The frames that a piece's voice is known by: where nobody else speaks, if enough."""
        mine = np.zeros(FRAMES, bool)
        for start, end in piece:
            mine[start:end] = True
        alone = mine & (active.sum(1) == 1)
        return alone if alone.sum() * HOP >= self._listening.alone_s * SAMPLE_RATE else mine

    def _vectors(self, voices: Sequence[Tensor]) -> Vectors:
        """A vector of each piece's features, which are repeated to a multiple of _BUCKET."""
        lengths = [-(-len(features) // _BUCKET) * _BUCKET for features in voices]
        vectors = np.zeros((len(voices), SIZE), np.float32)
        for length in set(lengths):
            indices = [index for index, one in enumerate(lengths) if one == length]
            batch = torch.stack([_repeated(voices[index], length) for index in indices])
            vectors[indices] = self._embedding(batch).cpu().numpy()
        return vectors


def _load(network: _Network, path: Path, device: torch.device) -> _Network:
    """A network with its weights, for inference; it computes in FP32."""
    network.load_state_dict({name: w.float() for name, w in load_file(path).items()})
    return network.requires_grad_(False).eval().to(device)


def runs(active: Active) -> list[Span]:
    """First index and the one after the last of each stretch of what is true, of (n,)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], active, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _levels(windows: Tensor) -> Tensor:
    """How loud each frame of windows, (n, SAMPLES), is: dB, (n, FRAMES)."""
    frames = windows[:, OFFSET : OFFSET + FRAMES * HOP].reshape(-1, FRAMES, HOP)
    return 10 * torch.log10(frames.square().mean(-1) + 1e-10)


def _parts(span: Span, most: float) -> list[Span]:
    """A span in equal parts of at most so many frames."""
    edges = np.linspace(*span, math.ceil((span[1] - span[0]) / most) + 1).round().astype(int)
    return list(itertools.pairwise(edges.tolist()))


def _features_of(frames: Active) -> npt.NDArray[np.int64]:
    """The frames of features that lie in those of a window."""
    middles = np.arange((SAMPLES - FRAME) // FBANK_HOP + 1) * FBANK_HOP + FRAME // 2
    return np.flatnonzero(frames[np.clip((middles - OFFSET) // HOP, 0, FRAMES - 1)])


def _repeated(features: Tensor, length: int) -> Tensor:
    """Features without their mean, (length, BANDS): they begin again until there are so many."""
    features = features - features.mean(0)
    return features.repeat(-(-length // len(features)), 1)[:length]


def _batches(blocks: Iterable[Samples], step: int) -> Iterator[tuple[Samples, int, bool]]:
    """Windows, (at most _BATCH, SAMPLES), each `step` samples after the one before.

    With the number of samples that came by then, and whether the last window, which ends with
    silence, is among them.
    """
    waiting, held, came = list[Samples](), 0, 0
    for block in blocks:
        waiting.append(block)
        held, came = held + len(block), came + len(block)
        while held > (_BATCH - 1) * step + SAMPLES:
            samples = np.concatenate(waiting)
            yield _windows(samples, step)[:_BATCH], came, False
            waiting, held = [samples[_BATCH * step :]], held - _BATCH * step
    if held:
        samples = np.concatenate(waiting)
        count = 1 + max(0, -(-(held - SAMPLES) // step))
        padded = np.pad(samples, (0, (count - 1) * step + SAMPLES - held))
        windows = _windows(padded, step)
        for first in range(0, count, _BATCH):
            yield windows[first : first + _BATCH], came, first + _BATCH >= count


def _windows(samples: Samples, step: int) -> Samples:
    return np.lib.stride_tricks.sliding_window_view(samples, SAMPLES)[::step].astype(np.float32)
