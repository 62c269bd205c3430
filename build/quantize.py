"""Quantize weights to symmetric INT8 with one FP16 scale per output channel."""

import torch

from serve.contract.engine import LayerError

QMAX = 127


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of a finite matrix to int8 with scale max|row| / 127.

    The scale is rounded *up* to the next float16, and the codes are computed from that value. No
    code is therefore clipped: every element is at most half a scale from its code, even if the
    scale is a float16 subnormal. A row of zeros gets the scale 0. A row beyond float16's range
    (above 127 * 65504) gets an infinite scale, which the caller must reject.

    Args:
        weight: (rows, columns), any floating dtype.

    Returns:
        The codes, int8 (rows, columns), and the scales, float16 (rows,); weight ~ codes * scale.
    """
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scale = (largest / QMAX).half()
    scale = torch.where(
        scale.float() * QMAX < largest,
        torch.nextafter(scale, torch.full_like(scale, torch.inf)),
        scale,
    )
    divisor = torch.where(scale == 0, 1.0, scale.float())[:, None]
    codes = torch.round(weight / divisor).clamp_(-QMAX, QMAX)
    return codes.to(torch.int8), scale


def layer_error(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> LayerError:
    """Measure ||w - w'|| / ||w|| (Frobenius norm; 0 for a zero matrix) and max |w - w'|."""
    weight = weight.float()
    difference = weight - codes.float() * scale.float()[:, None]
    norm = float(torch.linalg.vector_norm(weight))
    relative = float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0
    return LayerError(relative, float(difference.abs().max()))
