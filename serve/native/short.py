"""Keys and values of cross-attention for short windows, on a CPU: fewer than for whole windows.

Behind a window that is encoded at its own length stands what the encoder gives for silence: behind
10 s that is two frames of three. These are the same for every window, so frames of silence whose
keys are alike share one key and one value, their means, and the logarithm of how many they are is
added to its score. (Frames that follow each other will not do: their keys differ.) With base this
changes what attention gives by 1.5 %.
"""

import dataclasses
from collections.abc import Sequence

import torch

from serve.native.kernels.definition import CrossKV

_LENGTHS = (640, 896)  # keys for windows of up to 10 and of up to 15 s, silence's included
_SILENT = 140  # keys that stand for silence


@dataclasses.dataclass(frozen=True)
class Room:
    """Where windows of one length have their keys and values."""

    cross: torch.Tensor  # (layers, 2, slots, heads, one of _LENGTHS, 64), keys before values
    silence: torch.Tensor  # (layers, 2, heads, _SILENT, 64), what follows a window's own frames
    layers: Sequence[CrossKV]  # of `cross`, with the weights of keys


class ShortWindows:
    """Which slots hold short windows, and their keys and values.

    Args:
        whole: of whole windows, (layers, 2, slots, heads, n_audio_ctx, 64).
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._cross: dict[int, torch.Tensor] = {}  # by length
        self._rooms: dict[int, Room] = {}  # by frames of their own
        self._of_slot: list[Room | None] = [None] * whole.shape[2]

    def fits(self, seen: int) -> bool:
        """Tell whether windows of so many frames are short enough."""
        return seen + _SILENT <= _LENGTHS[-1] < self._whole.shape[-2]

    def prepare(self, seen: int, silence: torch.Tensor) -> None:
        """Make room for windows of so many frames.

        Args:
            seen: a number that fits.
            silence: keys and values of a window of it, (layers, 2, heads, n_audio_ctx, 64).
        """
        if seen in self._rooms:
            return
        length = next(length for length in _LENGTHS if seen + _SILENT <= length)
        if length not in self._cross:
            shape = list(self._whole.shape)
            shape[-2] = length
            self._cross[length] = self._whole.new_zeros(shape)
        cross = self._cross[length]
        few, log_weights = merged(silence[..., seen:, :], _SILENT)
        unused = length - seen - _SILENT
        log_weights = torch.nn.functional.pad(log_weights, (0, unused), value=-torch.inf)
        log_weights = torch.nn.functional.pad(log_weights, (seen, 0))  # a frame stands for itself
        layers = [
            CrossKV(k, v, log_weights=weights)
            for (k, v), weights in zip(cross, log_weights, strict=True)
        ]
        self._rooms[seen] = Room(cross, few, layers)

    def take(self, seen: int, slots: list[int]) -> torch.Tensor:
        """Put silence into slots for windows of so many frames.

        Returns:
            Where the windows' own keys and values go: (layers, 2, slots, heads, at least `seen`,
            64).
        """
        room = self._rooms.get(seen)
        for slot in slots:
            self._of_slot[slot] = room
            if room is not None:
                until = seen + room.silence.shape[-2]
                room.cross[:, :, slot, :, seen:until] = room.silence
        return self._whole if room is None else room.cross

    def of_slots(self, layer: int) -> list[CrossKV | None]:
        """For each slot, what a layer reads in place of whole windows' keys; None = those."""
        return [None if room is None else room.layers[layer] for room in self._of_slot]

    def cross_keys(
        self, layers: torch.Tensor, slots: list[int], heads: torch.Tensor, frames: int
    ) -> torch.Tensor:
        """See `Cache.cross_keys`."""
        windows = []
        for slot in slots:
            room = self._of_slot[slot]
            cross = self._whole if room is None else room.cross
            keys = cross[layers, 0, slot, heads, :frames].float()
            windows.append(torch.nn.functional.pad(keys, (0, 0, 0, frames - keys.shape[-2])))
        return torch.stack(windows)


def merged(cross: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge keys that lie close together into their mean, and their values likewise.

    Each belongs to the nearest of `count` of them, which are chosen one by one, each the farthest
    from those before (T. F. Gonzalez, Clustering to minimize the maximum intercluster distance,
    1985).

    Args:
        cross: keys before values, (layers, 2, heads, frames, 64).
        count: of keys that stay.

    Returns:
        The same of (layers, 2, heads, count, 64), and the logarithm of how many each stands for,
        float32 (layers, heads, count), -inf of none.
    """
    keys = cross[:, 0].float()
    nearest = torch.zeros(keys.shape[:-1], dtype=torch.int64)
    distance = torch.full(keys.shape[:-1], torch.inf)
    squares = keys.square().sum(dim=-1)
    for number in range(count):
        at = distance.argmax(dim=-1)[..., None]
        farthest = keys.gather(-2, at[..., None].expand(*at.shape, keys.shape[-1]))
        apart = squares + squares.gather(-1, at) - 2 * (keys @ farthest.mT)[..., 0]
        nearest[apart < distance] = number
        distance = torch.minimum(distance, apart)
    member = torch.nn.functional.one_hot(nearest, count).float()
    counts = member.sum(dim=-2)
    share = (member / counts.clamp_min(1)[..., None, :]).mT
    return (share[:, None] @ cross.float()).to(cross.dtype), counts.log()
