"""Cross-attention's keys and values of short windows, on a CPU: fewer than of whole ones.

A window that is encoded at its own length is followed by what the encoder gives for silence: for
one of 10 s that is two frames of three. They are the same for every window. So those whose keys lie
close together have one key and one value, their means, and the logarithm of how many they are is
added to its score. (Frames that follow each other will not do: their keys lie far apart.) Of base
that changes what attention gives by 1.5 %.
"""

import dataclasses
from collections.abc import Sequence

import torch

from serve.native.kernels.definition import CrossKV

_LENGTHS = (640, 896)  # keys of windows up to 10 and up to 15 s; one layout for each
_SILENT = 140  # of which no more are of silence


@dataclasses.dataclass(frozen=True)
class Room:
    """Where windows of one length have their keys and values."""

    cross: torch.Tensor  # (layers, 2, slots, heads, length, 64), of all such lengths
    silence: torch.Tensor  # (layers, 2, heads, count, 64), which follows their own frames
    layers: Sequence[CrossKV]  # of all slots, with the weights


class ShortWindows:
    """Which slots have short windows, and their keys and values.

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
        behind = (0, length - seen - _SILENT)  # what nothing is attended to
        log_weights = torch.nn.functional.pad(log_weights, behind, value=-torch.inf)
        log_weights = torch.nn.functional.pad(log_weights, (seen, 0))
        layers = [
            CrossKV(k, v, log_weights=weights)
            for (k, v), weights in zip(cross, log_weights, strict=True)
        ]
        self._rooms[seen] = Room(cross, few, layers)

    def take(self, seen: int, slots: list[int]) -> torch.Tensor:
        """Say where slots' keys and values go, of windows of so many frames; silence is there.

        Returns:
            (layers, 2, slots, heads, at least `seen`, 64).
        """
        room = self._rooms.get(seen)
        for slot in slots:
            self._of_slot[slot] = room
            if room is not None:
                until = seen + room.silence.shape[-2]
                room.cross[:, :, slot, :, seen:until] = room.silence
        return self._whole if room is None else room.cross

    def of_slots(self, layer: int) -> list[CrossKV | None]:
        """Of each slot what cross-attention of a layer reads in place of the whole windows'."""
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
    """Put keys that lie close together into one, their mean, and their values.

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
