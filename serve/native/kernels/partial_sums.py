"""Partial sums of a linear layer of few rows; the next kernel finishes them while it reads."""

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
        return Sums(parts, given(matrix.scale, parts), given(matrix.bias, parts))


def given(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return x, or another tensor as an unused kernel argument if x is None."""
    return other if x is None else x


Flow = torch.Tensor | PartialSums


def unfinished(x: Flow) -> tuple[Sums, int, bool]:
    """Return (sums, parts, whether quantized), the kernel arguments of a linear layer's output."""
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return Sums(x, x, x), 0, False
    return x.sums, len(x.parts), x.matrix.scale is not None
