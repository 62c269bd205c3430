"""Keep fewer cross-attention keys and values for short windows, on a CPU.

In the cache, a short window is followed by the encoder's output for silence: with 10 s of audio,
silence makes up two thirds of the frames. It is the same for every window. Frames of silence with
similar keys therefore share one key and one value, their means. The logarithm of the number of
frames is added to the score. Merging adjacent frames would not work, since their keys differ. With
base, this changes the output of attention by 1.5 %.
"""

import dataclasses
from collections.abc import Sequence

import torch

from serve.native.kernels.reference_ops import CrossKV

_LENGTHS = (640, 896)  # keys of windows of up to 10 s and up to 15 s, with those of silence
_SILENT = 140  # merged keys of silence


@dataclasses.dataclass(frozen=True)
class ShortCrossCache:
    """The keys and values of windows of one length."""

    cross: torch.Tensor  # (layers, 2, slots, heads, one of _LENGTHS, 64), keys before values
    silence: torch.Tensor  # (layers, 2, heads, _SILENT, 64), after the window's own frames
    layers: Sequence[CrossKV]  # views of `cross`, with the weights of the keys


class ShortCaches:
    """The slots that hold short windows, and their keys and values.

    Args:
        full_cache: the cache of full-length windows, (layers, 2, slots, heads, n_audio_ctx, 64).
    """

    def __init__(self, full_cache: torch.Tensor) -> None:
        self._full_cache = full_cache
        self._cross: dict[int, torch.Tensor] = {}  # by length
        self._caches: dict[int, ShortCrossCache] = {}  # by the window's own frames
        self._by_slot: list[ShortCrossCache | None] = [None] * full_cache.shape[2]

    def fits(self, n_frames: int) -> bool:
        """Return whether windows of `n_frames` frames are short enough."""
        return n_frames + _SILENT <= _LENGTHS[-1] < self._full_cache.shape[-2]

    def prepare(self, n_frames: int, silence: torch.Tensor) -> None:
        """Allocate the cache for windows of `n_frames` frames.

        Args:
            n_frames: a number of frames that fits.
            silence: keys and values of silence, (layers, 2, heads, n_audio_ctx, 64).
        """
        if n_frames in self._caches:
            return
        length = next(length for length in _LENGTHS if n_frames + _SILENT <= length)
        if length not in self._cross:
            shape = list(self._full_cache.shape)
            shape[-2] = length
            self._cross[length] = self._full_cache.new_zeros(shape)
        cross = self._cross[length]
        silent, log_weights = merge_keys(silence[..., n_frames:, :], _SILENT)
        unused = length - n_frames - _SILENT
        log_weights = torch.nn.functional.pad(log_weights, (0, unused), value=-torch.inf)
        log_weights = torch.nn.functional.pad(log_weights, (n_frames, 0))  # unmerged frames weigh 1
        layers = [
            CrossKV(k, v, log_weights=weights)
            for (k, v), weights in zip(cross, log_weights, strict=True)
        ]
        self._caches[n_frames] = ShortCrossCache(cross, silent, layers)

    def assign(self, n_frames: int, slots: list[int]) -> torch.Tensor:
        """Assign slots to windows of `n_frames` frames, and write silence into their caches.

        Returns:
            The cache for the windows' own keys and values, (layers, 2, slots, heads, at least
            `n_frames`, 64).
        """
        cache = self._caches.get(n_frames)
        for slot in slots:
            self._by_slot[slot] = cache
            if cache is not None:
                end = n_frames + cache.silence.shape[-2]
                cache.cross[:, :, slot, :, n_frames:end] = cache.silence
        return self._full_cache if cache is None else cache.cross

    def by_slot(self, layer: int) -> list[CrossKV | None]:
        """Return a layer's keys and values by slot; None if the slot holds a full-length window."""
        return [None if cache is None else cache.layers[layer] for cache in self._by_slot]

    def cross_keys(
        self, layers: torch.Tensor, slots: list[int], heads: torch.Tensor, frames: int
    ) -> torch.Tensor:
        windows = []
        for slot in slots:
            cache = self._by_slot[slot]
            cross = self._full_cache if cache is None else cache.cross
            keys = cross[layers, 0, slot, heads, :frames].float()
            windows.append(torch.nn.functional.pad(keys, (0, 0, 0, frames - keys.shape[-2])))
        return torch.stack(windows)


def merge_keys(cross: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge similar keys into their mean, and the values of these keys likewise.

    Centres are chosen one by one; each is the key farthest from all earlier centres. Every key
    belongs to its nearest centre (T. F. Gonzalez, Clustering to minimize the maximum intercluster
    distance, 1985).

    Args:
        cross: keys before values, (layers, 2, heads, frames, 64).
        count: the number of merged keys.

    Returns:
        Merged keys and values, (layers, 2, heads, count, 64), and the logarithm of the number of
        keys in each, float32 (layers, heads, count); -inf for none.
    """
    keys = cross[:, 0].float()
    nearest = torch.zeros(keys.shape[:-1], dtype=torch.int64)
    distance = torch.full(keys.shape[:-1], torch.inf)
    squares = keys.square().sum(dim=-1)
    for index in range(count):
        centre = distance.argmax(dim=-1)[..., None]
        farthest = keys.gather(-2, centre[..., None].expand(*centre.shape, keys.shape[-1]))
        to_centre = squares + squares.gather(-1, centre) - 2 * (keys @ farthest.mT)[..., 0]
        nearest[to_centre < distance] = index
        distance = torch.minimum(distance, to_centre)
    member = torch.nn.functional.one_hot(nearest, count).float()
    counts = member.sum(dim=-2)
    weights = (member / counts.clamp_min(1)[..., None, :]).mT
    return (weights[:, None] @ cross.float()).to(cross.dtype), counts.log()
