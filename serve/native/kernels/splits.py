"""Compute the runs and splits of cross-attention in Gluon, for both kernels of `cross`."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import dataclasses
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from serve.native.kernels.fragments import (
    arange_3d,
    broadcast_like,
    channel_index,
    exp2,
    key_index,
    left_operand,
    query_layout,
    query_operand,
    top_rows,
    values_operand,
)
from serve.native.kernels.linear import Sums

RUNS = gl.constexpr(4)  # runs per split
_LOG2_E = gl.constexpr(1.4426950408889634)
# Factor of the queries of INT8 keys: keeps them in float16's range.
_QUERY_SCALE = gl.constexpr(16.0)
# `fragments` converts INT8 to float16 as (number + INT8_OFFSET) / SUBNORMAL_SCALE.
SUBNORMAL_SCALE, INT8_OFFSET = gl.constexpr(16777216.0), gl.constexpr(128.0)


class CrossCache(NamedTuple):
    """Keys and values of every slot, (slots, heads, keys, 64); INT8 packed four to an int32."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor  # float32 (slots, heads, 64); unused if the cache is not INT8
    v_scale: torch.Tensor


class SplitGroups(NamedTuple):
    """The tensors of `step_batch.SlotGroups`."""

    slots: torch.Tensor
    first: torch.Tensor
    size: torch.Tensor


class Workspace(NamedTuple):
    """The sums of each split, until they are added."""

    partial: torch.Tensor  # float32 (n_tokens, heads, splits, 64)
    stats: torch.Tensor  # float32 (n_tokens, heads, splits, 2): peak and total
    arrived: torch.Tensor  # int32 (n_tokens, heads): the number of finished splits


@dataclasses.dataclass(frozen=True)
class SplitConfig:
    """Compile-time parameters of both kernels."""

    parts: int  # number of partial sums that make up the queries; 0: the queries are finished
    quantized: bool  # whether the partial sums need a scale
    int8: bool  # whether keys and values are int8
    pdl: bool
    direct: bool  # group i is exactly token i, of slot i
    run: int  # keys per run
    splits: int


@gluon.jit
def load_queries(
    q: Sums,
    k_scale,
    token: int,
    end: int,
    n_tokens: int,
    heads: int,
    head: int,
    row: int,
    mma: gl.constexpr,
    config: gl.constexpr,
) -> gl.tensor:
    """Load the queries of tokens [token, end) of a head, and add up their partial sums.

    The queries are multiplied by the keys' scales, those of slot and head `row` in `k_scale`. They
    are also multiplied by log2(e), because the softmax uses `exp2`.
    """
    warps: gl.constexpr = mma.warps_per_cta[0]
    layout: gl.constexpr = query_layout(warps)
    d = arange_3d(64, 2, layout)
    tokens = token + arange_3d(16, 1, layout) + arange_3d(warps, 0, layout) * 0
    n = head * 64 + d
    offsets = tokens * (heads * 64) + n
    value = gl.load(q.data + offsets, mask=tokens < end, other=0.0)
    parts: gl.constexpr = config.parts
    if parts > 0:
        for part in gl.static_range(1, parts):
            begin = q.data + part * n_tokens * heads * 64
            value += gl.load(begin + offsets, mask=tokens < end, other=0.0)
        bias = gl.load(q.bias + n).to(gl.float32)
        if config.quantized:
            scale = broadcast_like(gl.load(q.scale + n), value)
            value = gl.fma(value, scale, broadcast_like(bias, value))
        else:
            value = value + bias
        value = value.to(gl.float16)
    value = value.to(gl.float32)
    if config.int8:
        value = value * (gl.load(k_scale + row * 64 + d) * (_QUERY_SCALE * _LOG2_E))
    else:
        value = value * _LOG2_E
    return query_operand(value.to(gl.float16), config.int8, mma)


@gluon.jit
def softmax_weights(score, keys_left: int, int8: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Return the float16 softmax numerators and the highest scores of scores (warps, rows, keys).

    Only the first `keys_left` keys of all warps together exist.
    """
    score_scale: gl.constexpr = SUBNORMAL_SCALE / _QUERY_SCALE if int8 else 1.0
    layout: gl.constexpr = score.type.layout
    keys: gl.constexpr = score.shape[2]
    warps: gl.constexpr = score.shape[0]
    key = key_index(arange_3d(keys, 2, layout)) + arange_3d(warps, 0, layout) * keys
    if keys_left < keys * warps:
        score = gl.where(key < keys_left, score, -1e30)
    peak = gl.max(score, 2) * score_scale
    scale = gl.full(score.shape, score_scale, gl.float32, layout)
    shifted = gl.fma(score, scale, broadcast_like(-gl.expand_dims(peak, 2), score))
    return exp2(shifted).to(gl.float16), peak


@gluon.jit
def weighted_values(
    weights, raw, mma: gl.constexpr, rows: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Return weighted sums of values (warps, rows, 64) and the sums of the weights (warps, rows).

    INT8 values are not yet multiplied by their scales.
    """
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    weights_operand = left_operand(weights, mma)
    zeros = gl.zeros([warps, 16, 64], gl.float32, mma)
    acc = mma_v2(weights_operand, values_operand(raw, mma), zeros)
    ones = gl.full([warps, keys, 8], 1.0, gl.float16, gl.DotOperandLayout(1, mma, 2))
    sums = mma_v2(weights_operand, ones, gl.zeros([warps, 16, 8], gl.float32, mma))
    return top_rows(acc, rows), gl.max(top_rows(sums, rows), 2)


@gluon.jit
def add_run(
    peak, total, acc, new_peak, new_total, new_acc
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Add the next run to the sum of earlier runs, with explicit operations for equal bits."""
    max_peak = gl.maximum(peak, new_peak)
    rescale = exp2(peak - max_peak)
    new_rescale = exp2(new_peak - max_peak)
    last: gl.constexpr = len(acc.shape) - 1
    total = gl.fma(new_total, new_rescale, total * rescale)
    new_acc_rescale = broadcast_like(gl.expand_dims(new_rescale, last), new_acc)
    acc = gl.fma(new_acc, new_acc_rescale, acc * gl.expand_dims(rescale, last))
    return max_peak, total, acc


@gluon.jit
def load_group(groups: SplitGroups, group: int, begin: int, end: int) -> tuple[int, int, int]:
    """Return (slot, low, high): the group's tokens [low, high) within [begin, end)."""
    size = gl.load(groups.size + group).to(gl.int32)
    low = gl.load(groups.first + group).to(gl.int32)
    high = gl.minimum(low + size, end)
    return gl.load(groups.slots + group).to(gl.int32), gl.maximum(low, begin), high


@gluon.jit
def combine_splits(
    workspace: Workspace,
    out,
    v_scale,
    begin: int,
    low: int,
    high: int,
    heads: int,
    head: int,
    tokens_per_pass: gl.constexpr,
    config: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Add the splits of tokens [low, high) in order, and store the attention's output."""
    d = gl.arange(0, 64, gl.SliceLayout(0, layout))
    channel = channel_index(d)
    splits: gl.constexpr = config.splits
    for start in range(low, high, tokens_per_pass):
        token = start + gl.arange(0, tokens_per_pass, gl.SliceLayout(1, layout))
        mask = token < high
        first_split = ((token - begin) * heads + head) * splits
        stats = workspace.stats + first_split * 2
        peak = gl.load(stats, mask=mask, other=0.0, cache_modifier=".cg")
        for split in gl.static_range(1, splits):
            pointers = workspace.stats + (first_split + split) * 2
            peak = gl.maximum(peak, gl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg"))
        acc = gl.zeros([tokens_per_pass, 64], gl.float32, layout)
        total = gl.zeros([tokens_per_pass], gl.float32, gl.SliceLayout(1, layout))
        for split in gl.static_range(splits):
            pointers = workspace.stats + (first_split + split) * 2
            weight = exp2(gl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg") - peak)
            split_total = gl.load(pointers + 1, mask=mask, other=1.0, cache_modifier=".cg")
            total = gl.fma(weight, split_total, total)
            pointers = workspace.partial + (first_split + split)[:, None] * 64 + d[None, :]
            partial = gl.load(pointers, mask=mask[:, None], other=0.0, cache_modifier=".cg")
            acc = gl.fma(broadcast_like(weight[:, None], partial), partial, acc)
        acc = acc / total[:, None]
        if config.int8:
            acc = acc * gl.load(v_scale + channel)[None, :]
        pointers_out = out + token[:, None] * (heads * 64) + head * 64 + channel[None, :]
        gl.store(pointers_out, acc.to(out.dtype.element_ty), mask=mask[:, None])
