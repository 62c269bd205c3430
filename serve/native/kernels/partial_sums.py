"""The output of a linear layer of few rows, which the next kernel finishes while it reads it."""

import dataclasses

import torch

from serve.native.kernels.linear import Sums
from serve.native.kernels.reference_ops import Matrix


@dataclasses.dataclass
class PartialSums:
    """A linear layer's output, of which the parts are still to be added up and finished."""

    parts: torch.Tensor  # float32 (parts, rows, out)
    matrix: Matrix
    dtype: torch.dtype  # of the finished output
    residual: torch.Tensor | None = None
    value: torch.Tensor | None = None  # finished and added to the residual, by the next layer norm

    @property
    def sums(self) -> Sums:
        """As kernels take it, with any tensor where its matrix has no scale or no bias."""
        parts, matrix = self.parts, self.matrix
        return Sums(parts, given(matrix.scale, parts), given(matrix.bias, parts))


def given(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor, or where there is none any other: kernels take one and do not read it."""
    return other if x is None else x


Flow = torch.Tensor | PartialSums


def unfinished(x: Flow) -> tuple[Sums, int, bool]:
    """(numbers, parts, whether quantized), as kernels take what they may finish."""
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return Sums(x, x, x), 0, False
    return x.sums, len(x.parts), x.matrix.scale is not None
