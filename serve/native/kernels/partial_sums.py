"""Partial sums of a linear layer of few rows; the next kernel adds them while it reads them."""

import dataclasses

import torch

from serve.native.kernels.linear import Sums
from serve.native.kernels.reference_ops import Matrix


@dataclasses.dataclass
class PartialSums:
    """A linear layer's output as parts that are not yet added."""

    parts: torch.Tensor  # float32 (parts, rows, out)
    matrix: Matrix
    dtype: torch.dtype  # of the finished output
    residual: torch.Tensor | None = None
    value: torch.Tensor | None = None  # output + residual, set by the next layer norm

    @property
    def sums(self) -> Sums:
        """Arguments for kernels; a missing scale or bias is an unused tensor."""
        parts, matrix = self.parts, self.matrix
        return Sums(parts, or_unused(matrix.scale, parts), or_unused(matrix.bias, parts))


def or_unused(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return x; if x is None, return the other tensor as an unused kernel argument."""
    return other if x is None else x


Flow = torch.Tensor | PartialSums


def kernel_sums(x: Flow) -> tuple[Sums, int, bool]:
    """Return a linear layer's output as kernel arguments.

    Returns:
        The sums, the number of parts (0: the output is finished), and whether it needs a scale.
    """
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return Sums(x, x, x), 0, False
    return x.sums, len(x.parts), x.matrix.scale is not None
