"""The keys of silence that cross-attention reads behind a short window, on a CPU.

A window that is encoded at its own length is followed by what the encoder gives for silence: for
one of 10 s those are two frames of three. They are the same in every window, so frames whose keys
lie close together share one key and one value, their means, and the logarithm of how many they
are is added to its score. Consecutive frames will not do: their keys lie far apart.
"""

import dataclasses
import functools

import torch

_MOST = 256  # keys of a head for a window's worth of silence; base's attention changes by 1.2 %


@dataclasses.dataclass(frozen=True)
class Behind:
    """The keys and values that stand for all frames of silence from some frame on."""

    cross: torch.Tensor  # (layers, 2, heads, count, 64), keys before values
    log_weights: list[torch.Tensor]  # by layer: float32 (heads, frames + count), 0 for a frame


class Silence:
    """Keys and values of a window of silence, alike ones together.

    Args:
        cross: keys before values, (layers, 2, heads, frames, 64).
    """

    def __init__(self, cross: torch.Tensor) -> None:
        self._cross = cross
        self._nearest = _nearest(cross[:, 0].float())
        self.behind = functools.cache(self._behind)

    def _behind(self, seen: int) -> Behind:
        """Put together what is behind the first `seen` frames."""
        member = torch.nn.functional.one_hot(self._nearest[..., seen:], _MOST).float()
        counts = member.sum(dim=-2)  # (layers, heads, _MOST)
        kept = int((counts > 0).sum(dim=-1).max())
        counts, which = counts.sort(dim=-1, descending=True, stable=True)
        member = member.gather(-1, which[..., None, :].expand_as(member))[..., :kept]
        counts = counts[..., :kept]
        share = (member / counts.clamp_min(1)[..., None, :]).transpose(-1, -2)
        means = share[:, None] @ self._cross[..., seen:, :].float()
        log_weights = torch.nn.functional.pad(counts.log(), (seen, 0))
        return Behind(means.to(self._cross.dtype), list(log_weights))


def _nearest(keys: torch.Tensor) -> torch.Tensor:
    """Find which of up to `_MOST` keys each is nearest to.

    Those keys are chosen one by one, each the farthest from those before (T. F. Gonzalez,
    Clustering to minimize the maximum intercluster distance, 1985).

    Args:
        keys: float32 (..., frames, 64).

    Returns:
        int64 (..., frames), below `_MOST`.
    """
    nearest = torch.zeros(keys.shape[:-1], dtype=torch.int64)
    distance = torch.full(keys.shape[:-1], torch.inf)
    for number in range(_MOST):
        farthest = distance.argmax(dim=-1)[..., None, None].expand(*keys.shape[:-2], 1, 64)
        apart = (keys - keys.gather(-2, farthest)).square().sum(dim=-1)
        nearest[apart < distance] = number
        distance = torch.minimum(distance, apart)
    return nearest
