"""Run the two networks on a recording: find pieces of speech and their voice vectors.

Windows of 10 s overlap slightly, so that each frame has context on both sides. The segmentation
network may confuse people who speak one after another, so the speech of one of a window's speakers
is split into pieces at pauses. Each piece gets its own vector.
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
from serve.speakers.networks import (
    FBANK_HOP,
    FRAME,
    FRAMES,
    HOP,
    OFFSET,
    SAMPLES,
    SIZE,
    SPEAKERS,
    Embedding,
    Segmentation,
    fbank,
)
from serve.speech.rate import SAMPLE_RATE

SEGMENTATION = Path(__file__).parent / "pyannote" / "segmentation-3.0.safetensors"
EMBEDDING = Path(__file__).parent / "campplus" / "campplus_cn_en_common.safetensors"

_BATCH = 16  # windows per batch on a CPU
_GPU_BATCH = 256  # windows per batch on a GPU; smaller ones would be limited by the host
_FEATURE_BATCH = 32  # windows per batch of features, to limit memory
_VECTOR_FRAMES = 32_000  # feature frames per batch of vectors, to limit memory
_FEATURES = (SAMPLES - FRAME) // FBANK_HOP + 1  # feature frames per window
_LENGTH_MULTIPLE = 50  # the inputs of vectors are padded to a multiple of this many feature frames

_Network = TypeVar("_Network", Segmentation, Embedding)
Vectors = npt.NDArray[np.float32]
Active = npt.NDArray[np.bool_]
Frames = npt.NDArray[np.int64]

# Thresholds of pieces, tuned with `python -m eval speakers`.
_MARGIN = 59  # frames at either end of a window that the adjacent window covers: 1 s
_STEP = FRAMES - 2 * _MARGIN  # frames between the starts of windows
_MIN_ACTIVITY = 0.45  # minimum probability of an active speaker in a frame
_MIN_QUIET_S = 0.35  # minimum length of quiet frames that count as silence
# A quiet frame is less than `_FLOOR_DB` above the 5 % quantile of its window's levels, and more
# than `_BELOW_DB` below the 95 % quantile.
_FLOOR_DB = 5.0
_BELOW_DB = 20.0
_MAX_PAUSE_S = 0.3  # a longer pause ends a piece
_FULL_PIECE_S = 2.0  # a piece with this much speech ends at its next pause
_MAX_RUN_S = 4.0  # maximum length of continuous speech in a piece
_MIN_ALONE_S = 0.5  # with less speech alone, overlapping speech is used for the vector, too
_MIN_PIECE_S = 0.15  # drop pieces with less speech

Span = tuple[int, int]
"""The first frame of an interval in the recording, and the frame after its last one."""


@dataclasses.dataclass(frozen=True, eq=False)
class SpeakerEmbeddings:
    """The m pieces of speech in a recording, in order of windows."""

    seconds: float  # length of the recording
    spans: tuple[tuple[Span, ...], ...]  # intervals of each piece
    speech_s: npt.NDArray[np.float32]  # (m,), seconds of speech behind each vector
    vectors: Vectors  # (m, SIZE), unit vectors


class DiarizationModels:
    """Both networks on a device. Thread-safe.

    Args:
        device: the networks' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch = _BATCH if device.type == "cpu" else _GPU_BATCH
        self._dtype = torch.float32 if device.type == "cpu" else torch.float16
        self._segmentation = _load(Segmentation(), SEGMENTATION, device, self._dtype)
        self._embedding = _load(Embedding(), EMBEDDING, device, self._dtype)

    @torch.inference_mode()
    def embed(self, blocks: Iterable[Samples]) -> SpeakerEmbeddings:
        """Find the pieces of speech in blocks of samples, and compute their vectors.

        Only some windows are in memory at a time.
        """
        spans, speech_s = list[tuple[Span, ...]](), list[float]()
        vectors, count, seconds = [np.zeros((0, SIZE), np.float32)], 0, 0.0
        for batch, samples, last in _batches(blocks, _STEP * HOP, self._batch):
            on_device = torch.from_numpy(batch).to(self._device)
            windows = on_device.unfold(0, SAMPLES, _STEP * HOP)
            active = self._active(windows, _levels(on_device).unfold(0, FRAMES, _STEP))
            active[int(count == 0) :, :_MARGIN] = False
            active[: len(active) - last, FRAMES - _MARGIN :] = False
            frames, active_windows = list[Frames](), np.flatnonzero(active.any((1, 2)))
            for position, index in enumerate(active_windows):
                window, first_feature = count + int(index), position * _FEATURES
                for speaker, piece in self._pieces(active[index]):
                    indices = _features_of(self._embedding_frames(active[index], speaker, piece))
                    frames.append(first_feature + indices)
                    spans.append(tuple((a + window * _STEP, b + window * _STEP) for a, b in piece))
                    speech_s.append(len(indices) * FBANK_HOP / SAMPLE_RATE)
            if frames:
                vectors.append(self._vectors(_features(windows, active_windows), frames))
            count, seconds = count + len(windows), samples / SAMPLE_RATE
        return SpeakerEmbeddings(
            seconds, tuple(spans), np.asarray(speech_s, np.float32), unit(np.concatenate(vectors))
        )

    def _active(self, windows: Tensor, levels: Tensor) -> Active:
        """Return which speakers are active in each frame, (n, FRAMES, SPEAKERS).

        Args:
            windows: (n, SAMPLES).
            levels: (n, FRAMES), see `_levels`.
        """
        activity = self._segmentation.activity(windows.to(self._dtype)).float()
        active = activity.cpu().numpy() >= _MIN_ACTIVITY
        self._clear_quiet_frames(active, levels.cpu().numpy())
        return active

    def _clear_quiet_frames(self, active: Active, levels: npt.NDArray[np.float32]) -> None:
        """Clear the activity, (n, FRAMES, SPEAKERS), in quiet frames by levels, (n, FRAMES).

        The network bridges pauses of up to a second, for example when people read word by word.
        """
        floor, loud = np.quantile(levels, (0.05, 0.95), axis=1)
        limits = np.minimum(floor + _FLOOR_DB, loud - _BELOW_DB)
        min_frames = _MIN_QUIET_S * SAMPLE_RATE / HOP
        for window, quiet in enumerate(levels < limits[:, None]):
            for start, end in runs(quiet):
                if end - start >= min_frames:
                    active[window, start:end] = False

    def _pieces(self, active: Active) -> Iterator[tuple[int, list[Span]]]:
        """Yield the pieces of a window's activity, (FRAMES, SPEAKERS), with their speakers."""
        max_pause, full_piece, max_run, min_piece = (
            seconds * SAMPLE_RATE / HOP
            for seconds in (_MAX_PAUSE_S, _FULL_PIECE_S, _MAX_RUN_S, _MIN_PIECE_S)
        )
        for speaker in range(SPEAKERS):
            piece = list[Span]()
            for run in runs(active[:, speaker]):
                for start, end in _parts(run, max_run):
                    length = sum(b - a for a, b in piece)
                    if piece and (start - piece[-1][1] > max_pause or length >= full_piece):
                        if length >= min_piece:
                            yield speaker, piece
                        piece = []
                    piece.append((start, end))
            if sum(b - a for a, b in piece) >= min_piece:
                yield speaker, piece

    def _embedding_frames(self, active: Active, speaker: int, piece: Sequence[Span]) -> Active:
        """Return the frames for a piece's vector: frames without other speakers, if enough."""
        piece_frames = np.zeros(FRAMES, bool)
        for start, end in piece:
            piece_frames[start:end] = True
        single_speaker = piece_frames & (active.sum(1) == 1)
        has_enough = single_speaker.sum() * HOP >= _MIN_ALONE_S * SAMPLE_RATE
        return single_speaker if has_enough else piece_frames

    def _vectors(self, features: Tensor, pieces: Sequence[Frames]) -> Vectors:
        """Compute the vector of each piece from its feature frames.

        Frames are repeated to a multiple of `_LENGTH_MULTIPLE`, and pieces of equal length form
        batches. All results are fetched together, so the host waits for a GPU only once.
        """
        lengths = [-(-len(frames) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE for frames in pieces]
        order, outputs = list[int](), list[Tensor]()
        for length in sorted(set(lengths)):
            indices = [index for index, size in enumerate(lengths) if size == length]
            group = [pieces[index] for index in indices]
            frames = torch.from_numpy(np.stack([np.resize(piece, length) for piece in group]))
            group_lengths = torch.tensor([len(piece) for piece in group])[:, None]
            weights = (torch.arange(length) < group_lengths) / group_lengths
            device_weights = weights[..., None].to(self._device)
            batch_size = _VECTOR_FRAMES // length
            for first in range(0, len(group), batch_size):
                batch = features[frames[first : first + batch_size].to(self._device)]
                means = (batch * device_weights[first : first + batch_size]).sum(1, keepdim=True)
                outputs.append(self._embedding((batch - means).to(self._dtype)))
            order += indices
        vectors = np.empty((len(pieces), SIZE), np.float32)
        vectors[order] = torch.cat(outputs).float().cpu().numpy()
        return vectors


def _load(network: _Network, path: Path, device: torch.device, dtype: torch.dtype) -> _Network:
    """Load a network's weights for inference."""
    network.load_state_dict({name: w.float() for name, w in load_file(path).items()})
    return network.requires_grad_(False).eval().to(device, dtype)


def unit(vectors: Vectors) -> Vectors:
    """Scale vectors, (..., size), to length 1."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-9), np.float32)


def runs(active: Active) -> list[Span]:
    """Return the first and last + 1 index of each run of true values in an array (n,)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], active, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _features(windows: Tensor, indices: npt.NDArray[np.int64]) -> Tensor:
    """Compute log-mel energies of the selected windows, (m * _FEATURES, BANDS)."""
    firsts = range(0, len(indices), _FEATURE_BATCH)
    batches = (indices[first : first + _FEATURE_BATCH] for first in firsts)
    return torch.cat([fbank(windows[batch]).flatten(0, 1) for batch in batches])


def _levels(samples: Tensor) -> Tensor:
    """Return the level of each frame of samples (n,) in dB, (frames,)."""
    frames = samples[OFFSET:].unfold(0, HOP, HOP)
    return 10 * torch.log10(frames.square().mean(-1) + 1e-10)


def _parts(span: Span, max_frames: float) -> list[Span]:
    """Split a span into equal parts of at most `max_frames` frames."""
    edges = np.linspace(*span, math.ceil((span[1] - span[0]) / max_frames) + 1).round().astype(int)
    return list(itertools.pairwise(edges.tolist()))


def _features_of(frames: Active) -> Frames:
    """Return the indices of the feature frames within the true frames of a window."""
    middles = np.arange(_FEATURES) * FBANK_HOP + FRAME // 2
    return np.flatnonzero(frames[np.clip((middles - OFFSET) // HOP, 0, FRAMES - 1)])


def _batches(
    blocks: Iterable[Samples], step: int, size: int
) -> Iterator[tuple[Samples, int, bool]]:
    """Yield the samples of up to `size` windows, which start every `step` samples.

    Each batch comes with the number of samples received so far, and whether it has the last window,
    which is padded with silence.
    """
    pending, pending_samples, received = list[Samples](), 0, 0
    for block in blocks:
        pending.append(block)
        pending_samples, received = pending_samples + len(block), received + len(block)
        while pending_samples > (size - 1) * step + SAMPLES:
            samples = np.concatenate(pending, dtype=np.float32)
            yield samples[: (size - 1) * step + SAMPLES], received, False
            pending, pending_samples = [samples[size * step :]], pending_samples - size * step
    if pending_samples:
        count = 1 + max(0, -(-(pending_samples - SAMPLES) // step))
        samples = np.concatenate(pending, dtype=np.float32)
        samples = np.pad(samples, (0, (count - 1) * step + SAMPLES - pending_samples))
        for first in range(0, count, size):
            n_windows = min(size, count - first)
            yield (
                samples[first * step :][: (n_windows - 1) * step + SAMPLES],
                received,
                first + n_windows == count,
            )
