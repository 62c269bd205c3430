"""Compute the runs and splits of cross-attention in Gluon, for both kernels of `cross`."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import dataclasses
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from serve.native.kernels.fragments import (
    along,
    channel_at,
    key_at,
    left_operand,
    like,
    power,
    query_layout,
    query_operand,
    top_rows,
    values_operand,
)
from serve.native.kernels.linear import Sums

RUNS = gl.constexpr(4)  # runs per split
_LOG2_E = gl.constexpr(1.4426950408889634)
_LARGER = gl.constexpr(16.0)  # factor of the queries of INT8 keys: keeps them in float16's range
# `fragments` converts INT8 to float16 as (number + 128) * 2 ** -24.
SUBNORMAL, RAISED = gl.constexpr(16777216.0), gl.constexpr(128.0)


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
def queries_of(
    q: Sums,
    k_scale,
    token: int,
    end: int,
    n_tokens: int,
    heads: int,
    head: int,
    row: int,
    mma: gl.constexpr,
    form: gl.constexpr,
) -> gl.tensor:
    """Finish the queries of tokens [token, end).

    They are multiplied by the keys' scales (`k_scale` of slot and head `row`) and by the factor
    that `power` needs.
    """
    warps: gl.constexpr = mma.warps_per_cta[0]
    layout: gl.constexpr = query_layout(warps)
    d = along(64, 2, layout)
    mine = token + along(16, 1, layout) + along(warps, 0, layout) * 0
    n = head * 64 + d
    at = mine * (heads * 64) + n
    value = gl.load(q.numbers + at, mask=mine < end, other=0.0)
    parts: gl.constexpr = form.parts
    if parts > 0:
        for part in gl.static_range(1, parts):
            begin = q.numbers + part * n_tokens * heads * 64
            value += gl.load(begin + at, mask=mine < end, other=0.0)
        offset = gl.load(q.bias + n).to(gl.float32)
        if form.quantized:
            value = gl.fma(value, like(gl.load(q.scale + n), value), like(offset, value))
        else:
            value = value + offset
        value = value.to(gl.float16)
    value = value.to(gl.float32)
    if form.int8:
        value = value * (gl.load(k_scale + row * 64 + d) * (_LARGER * _LOG2_E))
    else:
        value = value * _LOG2_E
    return query_operand(value.to(gl.float16), form.int8, mma)


@gluon.jit
def weights_of(score, missing: int, int8: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Return (float16 softmax numerators, largest scores) of scores (warps, rows, keys).

    Keys from index `missing` of the run on do not exist.
    """
    unit: gl.constexpr = SUBNORMAL / _LARGER if int8 else 1.0
    layout: gl.constexpr = score.type.layout
    keys: gl.constexpr = score.shape[2]
    warps: gl.constexpr = score.shape[0]
    place = key_at(along(keys, 2, layout)) + along(warps, 0, layout) * keys
    if missing < keys * warps:
        score = gl.where(place < missing, score, -1e30)
    peak = gl.max(score, 2) * unit
    factor = gl.full(score.shape, unit, gl.float32, layout)
    return power(gl.fma(score, factor, like(-gl.expand_dims(peak, 2), score))).to(gl.float16), peak


@gluon.jit
def mix(weights, raw, mma: gl.constexpr, rows: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Return (weighted values (warps, rows, 64), sums of weights (warps, rows)), INT8 unscaled."""
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    left = left_operand(weights, mma)
    mixed = mma_v2(left, values_operand(raw, mma), gl.zeros([warps, 16, 64], gl.float32, mma))
    ones = gl.full([warps, keys, 8], 1.0, gl.float16, gl.DotOperandLayout(1, mma, 2))
    sums = mma_v2(left, ones, gl.zeros([warps, 16, 8], gl.float32, mma))
    return top_rows(mixed, rows), gl.max(top_rows(sums, rows), 2)


@gluon.jit
def add_run(peak, total, acc, new_peak, new_total, new) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Add the next run to the sum of earlier runs, with explicit operations for equal bits."""
    top = gl.maximum(peak, new_peak)
    kept = power(peak - top)
    weight = power(new_peak - top)
    last: gl.constexpr = len(acc.shape) - 1
    total = gl.fma(new_total, weight, total * kept)
    acc = gl.fma(new, like(gl.expand_dims(weight, last), new), acc * gl.expand_dims(kept, last))
    return top, total, acc


@gluon.jit
def group_of(groups: SplitGroups, group: int, begin: int, end: int) -> tuple[int, int, int]:
    """Return (slot, low, high): the group's tokens [low, high) within [begin, end)."""
    size = gl.load(groups.size + group).to(gl.int32)
    low = gl.load(groups.first + group).to(gl.int32)
    high = gl.minimum(low + size, end)
    return gl.load(groups.slots + group).to(gl.int32), gl.maximum(low, begin), high


@gluon.jit
def sum_of_splits(
    workspace: Workspace,
    out,
    v_scale,
    begin: int,
    low: int,
    high: int,
    heads: int,
    head: int,
    some: gl.constexpr,
    form: gl.constexpr,
    layout: gl.constexpr,
) -> None:
    """Add the splits of tokens [low, high) in order, `some` tokens at a time."""
    d = gl.arange(0, 64, gl.SliceLayout(0, layout))
    channel = channel_at(d)
    splits: gl.constexpr = form.splits
    for start in range(low, high, some):
        token = start + gl.arange(0, some, gl.SliceLayout(1, layout))
        real = token < high
        line = ((token - begin) * heads + head) * splits
        top = gl.load(workspace.stats + line * 2, mask=real, other=0.0, cache_modifier=".cg")
        for split in gl.static_range(1, splits):
            at = workspace.stats + (line + split) * 2
            top = gl.maximum(top, gl.load(at, mask=real, other=0.0, cache_modifier=".cg"))
        mixed = gl.zeros([some, 64], gl.float32, layout)
        total = gl.zeros([some], gl.float32, gl.SliceLayout(1, layout))
        for split in gl.static_range(splits):
            at = workspace.stats + (line + split) * 2
            weight = power(gl.load(at, mask=real, other=0.0, cache_modifier=".cg") - top)
            sums = gl.load(at + 1, mask=real, other=1.0, cache_modifier=".cg")
            total = gl.fma(weight, sums, total)
            at = workspace.partial + (line + split)[:, None] * 64 + d[None, :]
            part = gl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
            mixed = gl.fma(like(weight[:, None], part), part, mixed)
        mixed = mixed / total[:, None]
        if form.int8:
            mixed = mixed * gl.load(v_scale + channel)[None, :]
        target = out + token[:, None] * (heads * 64) + head * 64 + channel[None, :]
        gl.store(target, mixed.to(out.dtype.element_ty), mask=real[:, None])
