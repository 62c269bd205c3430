"""INT8 weights: symmetric, one FP16 scale per output channel. Pure tensor functions."""

import dataclasses

import torch

from serve.engine import LayerError

QMAX = 127


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix as int8 codes (rows, columns) and a float16 scale per row; w ~ codes * scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The matrix that a runtime computes with, float32 (rows, columns)."""
        return self.codes.float() * self.scale.float()[:, None]


def quantize_rows(weight: torch.Tensor) -> Quantized:
    """Round each row of a finite matrix to int8 with scale max|row| / 127.

    The scale is rounded *up* to the next float16 and the codes are computed from that rounded
    value, so no code is ever clipped: every element is at most half a scale away from its code,
    even where the scale is a float16 subnormal. An all-zero row gets scale 0. A row beyond
    float16's range (above 127 * 65504) gets an infinite scale, which the caller must refuse.

    Args:
        weight: (rows, columns), any floating dtype.
    """
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scale = (largest / QMAX).half()
    scale = torch.where(
        scale.float() * QMAX < largest,
        torch.nextafter(scale, torch.full_like(scale, torch.inf)),
        scale,
    )
    divisor = torch.where(scale == 0, 1.0, scale.float())
    codes = torch.round(weight / divisor[:, None]).clamp_(-QMAX, QMAX).to(torch.int8)
    return Quantized(codes, scale)


def layer_error(weight: torch.Tensor, quantized: Quantized) -> LayerError:
    """What quantising cost: ||w - w'|| / ||w|| (Frobenius; 0 for zeros), and max |w - w'|."""
    weight = weight.float()
    difference = weight - quantized.dequantized()
    norm = float(torch.linalg.vector_norm(weight))
    relative = float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0
    return LayerError(relative, float(difference.abs().max()))
