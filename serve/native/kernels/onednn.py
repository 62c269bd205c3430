"""The operations on a CPU, by oneDNN's products of matrices that it lays out once.

A product of a matrix as torch holds it lays that out anew each time, which for a few rows takes
longer than the product. Matrices are float32, or bfloat16 where the processor multiplies it: AMX
has some six times AVX-512's products of float32. Sums are float32, and so is the residual stream,
for which bfloat16 has too few digits. It has too few for logits, too: their products are of INT8.
"""

import dataclasses

import torch
import torch.nn.functional as F

from serve.native.kernels import reference_ops
from serve.native.kernels.reference_ops import CrossKV, Matrix, Norm
from serve.native.kernels.step_batch import SlotGroups, StepBatch

Tensor = torch.Tensor
_INT8_MAX = 127.0
_ROWS = 32  # of a product; oneDNN adds up more in another order
_FINER = 254.0  # the second number of a pair counts in halves of the first's step / 127


def has_int8() -> bool:
    """Tell whether this processor adds up products of INT8 as INT32."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


class OneDnnOps:
    """Every operation, of the decoder and of the encoder.

    Args:
        dtype: of matrices and what they are multiplied with: float32 or bfloat16.
    """

    embed = staticmethod(reference_ops.embed)
    finish = staticmethod(reference_ops.finish)
    store_cross = staticmethod(reference_ops.store_cross)
    stem = staticmethod(reference_ops.stem)
    encoder_attention = staticmethod(reference_ops.encoder_attention)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def store(self, matrix: Matrix) -> Matrix:
        if matrix.scale is not None:
            packed = torch.ops.onednn.qlinear_prepack(matrix.weight, None)
            return dataclasses.replace(matrix, weight=packed)
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix.weight.contiguous(), None)
        return dataclasses.replace(matrix, weight=packed)

    def prepare(self, matrix: Matrix, norm: Norm | None = None) -> Matrix:
        return self.store(matrix)

    def norm(self, x: Tensor, params: Norm) -> Tensor:
        """See `reference_ops.norm`; the result is what matrices are multiplied with."""
        return reference_ops.norm(x, params).to(self._dtype)

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        return _product(x, matrix)

    def linear_gelu(self, x: Tensor, matrix: Matrix) -> Tensor:
        return _product(x, matrix, then="gelu")

    def add_linear_norm(
        self, x: Tensor, y: Tensor, matrix: Matrix, shift: Tensor, params: Norm
    ) -> Tensor:
        x += _product(y, matrix)
        return self.norm(x + shift, params)

    add_linear_last_norm = add_linear_norm

    def norm_linear(self, x: Tensor, params: Norm, matrix: Matrix) -> Tensor:
        return _product(self.norm(x, params), matrix)

    def norm_linear_gelu(self, x: Tensor, params: Norm, matrix: Matrix) -> Tensor:
        return _product(self.norm(x, params), matrix, then="gelu")

    def linear_residual(self, x: Tensor, matrix: Matrix, residual: Tensor) -> Tensor:
        return residual + _product(x, matrix)

    def self_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, feed: StepBatch
    ) -> Tensor:
        return reference_ops.self_attention(qkv, k_cache, v_cache, feed, _attend_past)

    def cross_attention(self, q: Tensor, cross: CrossKV, groups: SlotGroups) -> Tensor:
        attend = reference_ops.attend_audio if self._dtype == torch.float32 else _attend_audio
        return reference_ops.cross_attention(q, cross, groups, attend)

    def logits(
        self, x: Tensor, params: Norm, matrix: Matrix, wanted: Tensor | None = None
    ) -> Tensor:
        rows = reference_ops.norm(x if wanted is None else x[wanted], params)
        if matrix.scale is None:
            return _product(rows, matrix)
        return _times_int8(rows, matrix.weight, matrix.scale)


def _product(x: Tensor, matrix: Matrix, then: str = "none") -> Tensor:
    """A linear layer of a matrix that is laid out: (..., in) -> (..., out).

    In bfloat16 there are never more than `_ROWS` of a step, nor more windows than one: an answer is
    the same in any company, to the last bit. In float32 that is not to be had.
    """
    if x.dtype != torch.float32:
        parts = torch.split(x, 1 if x.ndim > 2 else _ROWS)
        if len(parts) > 1:
            return torch.cat([_product(part, matrix, then) for part in parts])
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, matrix.weight, matrix.bias, then, [], "none"
    )
    return product


def _attend_past(query: Tensor, k: Tensor, v: Tensor, unseen: Tensor | None) -> Tensor:
    """See `reference_ops.attend`; keys and values of rows are read as they lie, and not copied.

    Each query is one of its own for torch, which adds several up in another order.
    """
    assert unseen is not None
    rows, _, queries, _ = query.shape
    if queries == 1:
        return F.scaled_dot_product_attention(query, k, v, attn_mask=~unseen, scale=1.0)
    mixed = torch.empty_like(query)
    for row in range(rows):
        keys, values = (cache[row].expand(queries, -1, -1, -1) for cache in (k, v))
        out = F.scaled_dot_product_attention(
            query[row].transpose(0, 1).unsqueeze(2),
            keys,
            values,
            attn_mask=~unseen[row].transpose(0, 1).unsqueeze(2),
            scale=1.0,
        )
        mixed[row] = out.squeeze(2).transpose(0, 1)
    return mixed


def _attend_audio(query: Tensor, k: Tensor, v: Tensor, log_weights: Tensor | None) -> Tensor:
    """See `reference_ops.attend_audio`.

    Times the queries, and not the queries times them, keys are read as they lie: for bfloat16 half
    the time, for float32 more.
    """
    score = (k @ query.transpose(-1, -2)).transpose(-1, -2)
    if log_weights is None:
        return score.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    weighted = torch.empty(score.shape, dtype=torch.float32)  # laid out as the softmax likes it
    torch.add(score, log_weights[:, None], out=weighted)
    return weighted.softmax(-1).to(v.dtype) @ v


def _times_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows times an INT8 matrix; each number of a row goes as two of INT8, and so as 15 bits.

    Args:
        x: float32 (n, in).
        weight: int8 (out, in), laid out, whose rows stand for weight * scale.
        scale: float32 (out,).

    Returns:
        float32 (n, out).
    """
    step = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / _INT8_MAX
    whole = x / step
    first = whole.round()
    second = (whole - first) * _FINER
    pairs = torch.cat([first, second.round()]).to(torch.int8)
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    both: Tensor = torch.ops.onednn.qlinear_pointwise(
        pairs, 1.0, 0, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return both[: len(x)].add_(both[len(x) :], alpha=1 / _FINER).mul_(step)
