"""Quantize weights to symmetric INT8 with one FP16 scale per output channel."""

import torch

from serve.contract.manifest import LayerError

QMAX = 127
_BLOCK = 128  # columns; one product propagates their errors to later columns


def quantize_rows(
    weight: torch.Tensor, moment: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of a finite matrix to int8 with scale max|row| / 127.

    The scale is rounded *up* to the next float16, and the codes are computed from that value. No
    code is therefore clipped: every element is at most half a scale from its code, even if the
    scale is a float16 subnormal. A row of zeros gets the scale 0. A row beyond float16's range
    (above 127 * 65504) gets an infinite scale, which the caller must reject.

    Args:
        weight: (rows, columns), any floating dtype.
        moment: (columns, columns), the sum of x xT over inputs x, positive definite; the error of
            each column is compensated in later ones, see `_compensated`. None: round to nearest,
            as with a diagonal moment.

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
    divisor = torch.where(scale == 0, 1.0, scale.float())
    if moment is None:
        codes = _codes(weight, divisor[:, None])
    else:
        codes = _compensated(weight.to(moment.device), divisor.to(moment.device), moment).cpu()
    return codes.to(torch.int8), scale


def _codes(weight: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return torch.round(weight / divisor).clamp_(-QMAX, QMAX)


def _compensated(weight: torch.Tensor, divisor: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Round one column after the other, and compensate each error in the later columns.

    The algorithm minimises the change of the products with the inputs: GPTQ (Frantar et al. 2022,
    arXiv 2210.17323), columns in descending order of power.
    """
    order = moment.diagonal().argsort(descending=True, stable=True)
    # The upper Cholesky factor of the inverse; row i propagates an error in column i.
    lower = torch.linalg.cholesky(moment[order][:, order].double())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
    remaining = weight[:, order].T.contiguous()  # columns outermost
    codes = torch.empty_like(remaining)
    for begin in range(0, len(remaining), _BLOCK):
        end = min(begin + _BLOCK, len(remaining))
        block, block_factor = remaining[begin:end], factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            codes[begin + i] = _codes(column, divisor)
            errors[i] = (column - codes[begin + i] * divisor) / block_factor[i, i]
            block[i + 1 :].addr_(block_factor[i, i + 1 :], errors[i], alpha=-1)
        remaining[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    return codes[order.argsort()].T.contiguous()


def layer_error(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> LayerError:
    """Measure ||w - w'|| / ||w|| (Frobenius norm; 0 for a zero matrix) and max |w - w'|."""
    weight = weight.float()
    difference = weight - codes.float() * scale.float()[:, None]
    norm = float(torch.linalg.vector_norm(weight))
    relative = float(torch.linalg.vector_norm(difference)) / norm if norm else 0.0
    return LayerError(relative, float(difference.abs().max()))
