"""Run the operations on a CPU with oneDNN, which packs each matrix once.

An ordinary torch product packs its matrix each time. With few rows this takes longer than the
product. Matrices are float32, or bfloat16 if the processor supports it: AMX has about six times
the float32 throughput of AVX-512. Sums and the residual stream are float32, because bfloat16 has
too few digits for them. It also has too few digits for logits, which are computed in INT8.
"""

import dataclasses

import torch
import torch.nn.functional as F

from serve.native.kernels import reference_ops
from serve.native.kernels.reference_ops import CrossKV, Matrix, Norm
from serve.native.kernels.step_batch import SlotGroups, StepBatch

Tensor = torch.Tensor
_INT8_MAX = 127.0
_ROWS = 32  # maximum rows of a product; with more, oneDNN adds in another order
_SECOND_STEPS = 254.0  # steps of the second INT8 number of an input per step of the first


def has_int8() -> bool:
    """Return whether this processor accumulates products of INT8 in INT32."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


class OneDnnOps:
    """The operations of the decoder and of the encoder.

    Args:
        dtype: the dtype of matrices and their inputs, float32 or bfloat16.
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
        """Compute `reference_ops.norm`; return the dtype that matrices are multiplied with."""
        return reference_ops.norm(x, params).to(self._dtype)

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        return _product(x, matrix)

    def linear_gelu(self, x: Tensor, matrix: Matrix) -> Tensor:
        return _product(x, matrix, activation="gelu")

    def add_linear_norm(
        self, x: Tensor, y: Tensor, matrix: Matrix, shift: Tensor, params: Norm
    ) -> Tensor:
        x += _product(y, matrix)
        return self.norm(x + shift, params)

    add_linear_last_norm = add_linear_norm

    def norm_linear(self, x: Tensor, params: Norm, matrix: Matrix) -> Tensor:
        return _product(self.norm(x, params), matrix)

    def norm_linear_gelu(self, x: Tensor, params: Norm, matrix: Matrix) -> Tensor:
        return _product(self.norm(x, params), matrix, activation="gelu")

    def linear_residual(self, x: Tensor, matrix: Matrix, residual: Tensor) -> Tensor:
        return residual + _product(x, matrix)

    def self_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch
    ) -> Tensor:
        return reference_ops.self_attention(qkv, k_cache, v_cache, batch, _attend_past)

    def cross_attention(self, q: Tensor, cross: CrossKV, groups: SlotGroups) -> Tensor:
        attend = reference_ops.attend_audio if self._dtype == torch.float32 else _attend_audio
        return reference_ops.cross_attention(q, cross, groups, attend)

    def logits(
        self, x: Tensor, params: Norm, matrix: Matrix, logit_indices: Tensor | None = None
    ) -> Tensor:
        rows = reference_ops.norm(x if logit_indices is None else x[logit_indices], params)
        if matrix.scale is None:
            return _product(rows, matrix)
        return _times_int8(rows, matrix.weight, matrix.scale)


def _product(x: Tensor, matrix: Matrix, activation: str = "none") -> Tensor:
    """Apply a linear layer with a packed matrix: (..., in) -> (..., out).

    In bfloat16, the rows are split into products of at most `_ROWS` rows of a step, or of one
    window. The bits of a row then do not depend on the other rows. In float32 no such split makes
    them independent.
    """
    if x.dtype != torch.float32:
        parts = torch.split(x, 1 if x.ndim > 2 else _ROWS)
        if len(parts) > 1:
            return torch.cat([_product(part, matrix, activation) for part in parts])
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, matrix.weight, matrix.bias, activation, [], "none"
    )
    return product


def _attend_past(query: Tensor, k: Tensor, v: Tensor, masked: Tensor | None) -> Tensor:
    """Compute `reference_ops.attend` without a copy of the rows' keys and values.

    Torch gets each query as a separate batch entry, because its order of additions depends on
    the number of queries in an entry.
    """
    assert masked is not None
    rows, _, queries, _ = query.shape
    if queries == 1:
        return F.scaled_dot_product_attention(query, k, v, attn_mask=~masked, scale=1.0)
    result = torch.empty_like(query)
    for row in range(rows):
        keys, values = (cache[row].expand(queries, -1, -1, -1) for cache in (k, v))
        out = F.scaled_dot_product_attention(
            query[row].transpose(0, 1).unsqueeze(2),
            keys,
            values,
            attn_mask=~masked[row].transpose(0, 1).unsqueeze(2),
            scale=1.0,
        )
        result[row] = out.squeeze(2).transpose(0, 1)
    return result


def _attend_audio(query: Tensor, k: Tensor, v: Tensor, log_weights: Tensor | None) -> Tensor:
    """Compute `reference_ops.attend_audio` as keys times queries.

    This order reads the keys without a copy. It takes half the time in bfloat16, and more time in
    float32.
    """
    score = (k @ query.transpose(-1, -2)).transpose(-1, -2)
    if log_weights is None:
        return score.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    weighted = torch.empty(score.shape, dtype=torch.float32)  # row-major, for a faster softmax
    torch.add(score, log_weights[:, None], out=weighted)
    return weighted.softmax(-1).to(v.dtype) @ v


def _times_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply rows by an INT8 matrix; two INT8 numbers give each input 15 bits.

    Args:
        x: float32 (n, in).
        weight: int8 (out, in), packed; its rows represent weight * scale.
        scale: float32 (out,).

    Returns:
        float32 (n, out).
    """
    step = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / _INT8_MAX
    scaled = x / step
    first = scaled.round()
    second = (scaled - first) * _SECOND_STEPS
    pairs = torch.cat([first, second.round()]).to(torch.int8)
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    products: Tensor = torch.ops.onednn.qlinear_pointwise(
        pairs, 1.0, 0, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return products[: len(x)].add_(products[len(x) :], alpha=1 / _SECOND_STEPS).mul_(step)
