"""INT8 weights: symmetric, one FP16 scale per output channel. Pure tensor functions."""

import dataclasses

import torch

from serve.contract.engine import LayerError

QMAX = 127
_BLOCK = 128  # columns whose errors reach those behind them in one product


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix as int8 codes (rows, columns) and a float16 scale per row; w ~ codes * scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """Return the matrix that a runtime computes with, float32 (rows, columns)."""
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
    scale, divisor = _scales(weight)
    return Quantized(_codes(weight, divisor[:, None]).to(torch.int8), scale)


def quantize_compensated(weight: torch.Tensor, moment: torch.Tensor) -> Quantized:
    """Round column after column, the error of each made up for by the columns still to come.

    The scales are those of `quantize_rows`. Least change of the products with the inputs is sought:
    GPTQ (Frantar et al. 2022, arXiv 2210.17323), with the columns of the most power first.

    Args:
        weight: (rows, columns), finite, any floating dtype.
        moment: (columns, columns), sum of x xT over inputs x, positive definite; on the device of
            the weight. A diagonal one gives what `quantize_rows` does.
    """
    weight = weight.float()
    scale, divisor = _scales(weight)
    order = moment.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(moment[order][:, order])
    rest = weight[:, order].T.contiguous()  # columns outermost
    codes = torch.empty_like(rest)
    for begin in range(0, len(rest), _BLOCK):
        end = min(begin + _BLOCK, len(rest))
        block, local = rest[begin:end], factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            codes[begin + i] = _codes(column, divisor)
            errors[i] = (column - codes[begin + i] * divisor) / local[i, i]
            block[i + 1 :].addr_(local[i, i + 1 :], errors[i], alpha=-1)
        rest[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    return Quantized(codes[order.argsort()].T.contiguous().to(torch.int8), scale)


def _scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float16 scales of rows, and float32 ones to divide by: 1 for rows of zeros."""
    largest = weight.abs().amax(dim=1)
    scale = (largest / QMAX).half()
    scale = torch.where(
        scale.float() * QMAX < largest,
        torch.nextafter(scale, torch.full_like(scale, torch.inf)),
        scale,
    )
    return scale, torch.where(scale == 0, 1.0, scale.float())


def _codes(weight: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return torch.round(weight / divisor).clamp_(-QMAX, QMAX)


def _inverse_factor(moment: torch.Tensor) -> torch.Tensor:
    """Factor the inverse (Cholesky, upper, float32); row i says what follows from an error in i."""
    lower = torch.linalg.cholesky(moment.double())
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor.float()


def layer_error(weight: torch.Tensor, quantized: Quantized) -> LayerError:
    """Measure the cost: ||w - w'|| / ||w|| (Frobenius; 0 for zeros), and max |w - w'|."""
    weight = weight.float()
    difference = weight - quantized.dequantized()
    norm = float(torch.linalg.vector_norm(weight))
    relative = float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0
    return LayerError(relative, float(difference.abs().max()))
