"""Pieces of speech of one speaker, and their voices, as two networks hear them in a recording.

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

_BATCH = 16  # windows at a time on a CPU
_GPU_BATCH = 256  # and on a GPU, whose host would be what an hour waits for
_FEATURE_BATCH = 32  # windows whose features are computed at a time, for their memory
_VECTOR_FRAMES = 32_000  # of features whose vectors are computed at a time, for their memory
_FEATURES = (SAMPLES - FRAME) // FBANK_HOP + 1  # frames of features of a window
_BUCKET = 50  # frames of features: a vector is made of a multiple of so many

_Network = TypeVar("_Network", Segmentation, Embedding)
Active = npt.NDArray[np.bool_]
Frames = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Listening:
    """Settings of the networks' use; chosen by measurement, see `python -m eval speakers`."""

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
    """The networks' answer to a recording: m pieces of speech, in order of windows."""

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
        self._batch = _BATCH if device.type == "cpu" else _GPU_BATCH
        self._dtype = torch.float32 if device.type == "cpu" else torch.float16
        self._segmentation = _load(Segmentation(), SEGMENTATION, device, self._dtype)
        self._embedding = _load(Embedding(), EMBEDDING, device, self._dtype)

    @torch.inference_mode()
    def hear(self, blocks: Iterable[Samples]) -> Heard:
        """Listen to a recording of blocks of samples; holds some windows of it at a time."""
        step = self._listening.step
        spans, speech_s = list[tuple[Span, ...]](), list[float]()
        vectors, count, seconds = [np.zeros((0, SIZE), np.float32)], 0, 0.0
        for batch, samples, last in _batches(blocks, step * HOP, self._batch):
            on_device = torch.from_numpy(batch).to(self._device)
            windows = on_device.unfold(0, SAMPLES, step * HOP)
            active = self._active(windows, _levels(on_device).unfold(0, FRAMES, step))
            active[int(count == 0) :, : self._listening.margin] = False
            active[: len(active) - last, FRAMES - self._listening.margin :] = False
            frames, spoken = list[Frames](), np.flatnonzero(active.any((1, 2)))
            for place, index in enumerate(spoken):
                window, before = count + int(index), place * _FEATURES
                for speaker, piece in self._pieces(active[index]):
                    own = _features_of(self._own(active[index], speaker, piece))
                    frames.append(before + own)
                    spans.append(tuple((a + window * step, b + window * step) for a, b in piece))
                    speech_s.append(len(own) * FBANK_HOP / SAMPLE_RATE)
            if frames:
                vectors.append(self._vectors(_features(windows, spoken), frames))
            count, seconds = count + len(windows), samples / SAMPLE_RATE
        return Heard(
            seconds,
            tuple(spans),
            np.asarray(speech_s, np.float32),
            unit(np.concatenate(vectors)),
        )

    def _active(self, windows: Tensor, levels: Tensor) -> Active:
        """Tell who is active in each frame of windows, (n, FRAMES, SPEAKERS).

        Args:
            windows: (n, SAMPLES).
            levels: (n, FRAMES), see `_levels`.
        """
        activity = self._segmentation.activity(windows.to(self._dtype)).float()
        active = activity.cpu().numpy() >= self._listening.active
        self._leave_out_pauses(active, levels.cpu().numpy())
        return active

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
        settings = self._listening
        pause, enough, most, least = (
            seconds * SAMPLE_RATE / HOP
            for seconds in (settings.pause_s, settings.piece_s, settings.most_s, settings.least_s)
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

    def _vectors(self, features: Tensor, pieces: Sequence[Frames]) -> Vectors:
        """A vector of each piece's frames of features, which are repeated to a multiple of _BUCKET.

        They are asked for a length at a time, and fetched together: a GPU is waited for once.
        """
        lengths = [-(-len(frames) // _BUCKET) * _BUCKET for frames in pieces]
        order, outputs = list[int](), list[Tensor]()
        for length in sorted(set(lengths)):
            indices = [index for index, size in enumerate(lengths) if size == length]
            some = [pieces[index] for index in indices]
            frames = torch.from_numpy(np.stack([np.resize(piece, length) for piece in some]))
            once = torch.tensor([len(piece) for piece in some])[:, None]
            weights = (torch.arange(length) < once) / once
            shares, at_once = weights[..., None].to(self._device), _VECTOR_FRAMES // length
            for first in range(0, len(some), at_once):
                batch = features[frames[first : first + at_once].to(self._device)]
                means = (batch * shares[first : first + at_once]).sum(1, keepdim=True)
                outputs.append(self._embedding((batch - means).to(self._dtype)))
            order += indices
        vectors = np.empty((len(pieces), SIZE), np.float32)
        vectors[order] = torch.cat(outputs).float().cpu().numpy()
        return vectors


def _load(network: _Network, path: Path, device: torch.device, dtype: torch.dtype) -> _Network:
    """A network with its weights, for inference."""
    network.load_state_dict({name: w.float() for name, w in load_file(path).items()})
    return network.requires_grad_(False).eval().to(device, dtype)


def runs(active: Active) -> list[Span]:
    """First index and the one after the last of each stretch of what is true, of (n,)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], active, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _features(windows: Tensor, indices: npt.NDArray[np.int64]) -> Tensor:
    """Compute log-mel energies of some windows one after another, (m * _FEATURES, BANDS)."""
    some = (
        indices[first : first + _FEATURE_BATCH] for first in range(0, len(indices), _FEATURE_BATCH)
    )
    return torch.cat([fbank(windows[batch]).flatten(0, 1) for batch in some])


def _levels(samples: Tensor) -> Tensor:
    """Measure how loud each frame of samples, (n,), is: dB, (frames,)."""
    frames = samples[OFFSET:].unfold(0, HOP, HOP)
    return 10 * torch.log10(frames.square().mean(-1) + 1e-10)


def _parts(span: Span, most: float) -> list[Span]:
    """A span in equal parts of at most so many frames."""
    edges = np.linspace(*span, math.ceil((span[1] - span[0]) / most) + 1).round().astype(int)
    return list(itertools.pairwise(edges.tolist()))


def _features_of(frames: Active) -> Frames:
    """The frames of features that lie in those of a window."""
    middles = np.arange(_FEATURES) * FBANK_HOP + FRAME // 2
    return np.flatnonzero(frames[np.clip((middles - OFFSET) // HOP, 0, FRAMES - 1)])


def _batches(
    blocks: Iterable[Samples], step: int, size: int
) -> Iterator[tuple[Samples, int, bool]]:
    """Samples of at most `size` windows of SAMPLES, each `step` after the one before.

    With the number of samples that came by then, and whether the last window, which ends with
    silence, is among them.
    """
    waiting, held, came = list[Samples](), 0, 0
    for block in blocks:
        waiting.append(block)
        held, came = held + len(block), came + len(block)
        while held > (size - 1) * step + SAMPLES:
            samples = np.concatenate(waiting, dtype=np.float32)
            yield samples[: (size - 1) * step + SAMPLES], came, False
            waiting, held = [samples[size * step :]], held - size * step
    if held:
        count = 1 + max(0, -(-(held - SAMPLES) // step))
        samples = np.concatenate(waiting, dtype=np.float32)
        samples = np.pad(samples, (0, (count - 1) * step + SAMPLES - held))
        for first in range(0, count, size):
            some = min(size, count - first)
            yield (
                samples[first * step :][: (some - 1) * step + SAMPLES],
                came,
                first + some == count,
            )
