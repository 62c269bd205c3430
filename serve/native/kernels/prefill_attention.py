"""Compute the attention of whole texts with a Triton kernel: a tile of tokens shares each read.

The kernels of decoder steps add in an order that does not depend on the other tokens, so that a
text has the bits of single steps. They handle at most sixteen tokens at a time. No later step
continues a whole text (`SlotGroups.whole_texts`). It needs no equal bits and may use larger tiles.

Source: Dao, "FlashAttention-2" (2023), algorithm 1.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch
from serve.native.kernels.reference_ops import CrossKV
from serve.native.kernels.step_batch import SlotGroups

_TILE, _BLOCK = 64, 64  # tokens per program; keys per iteration
_WARPS, _STAGES = 4, 3
_GROUPS = 16  # minimum number of groups that a kernel is compiled for
_LOG2_E = tl.constexpr(1.4426950408889634)
# Factor of the queries of INT8 keys: keeps them in float16's range.
_QUERY_SCALE = tl.constexpr(16.0)


@triton.jit
def _tile_of(
    first, count, groups: int, padded_groups: tl.constexpr, tile: tl.constexpr
) -> tl.tuple:
    """Find the group of this program's tile.

    Returns:
        The group, its first token, its number of tokens, and the tile's index in the group.
    """
    index = tl.arange(0, padded_groups)
    tiles = (tl.load(count + index, mask=index < groups, other=0) + tile - 1) // tile
    ends = tl.cumsum(tiles, 0)
    before = ends <= tl.program_id(0)
    group = tl.minimum(tl.sum(before.to(tl.int32), 0), groups - 1)
    tile_index = tl.program_id(0) - tl.max(tl.where(before, ends, 0), 0)
    n_tokens = tl.where(tl.sum(tiles, 0) > tl.program_id(0), tl.load(count + group), 0)
    first_token = tl.load(first + group).to(tl.int32)
    return group, first_token, n_tokens.to(tl.int32), tile_index.to(tl.int32)


@triton.jit(do_not_specialize=("groups", "n_keys"))
def texts_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    slots,
    first,
    count,
    out,
    groups: int,
    heads: int,
    n_keys: int,
    q_stride: int,
    k_stride: int,
    causal: tl.constexpr,
    int8: tl.constexpr,
    padded_groups: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    head_dim: tl.constexpr,
) -> None:
    """Compute the attention of a tile of a group's tokens for one head.

    With `causal` it is self-attention: q, k and v are columns of the same rows, and a token's
    index in its group is its position. Otherwise the tokens attend to the slot's audio keys.
    """
    group, start, n_tokens, tile_index = _tile_of(first, count, groups, padded_groups, tile)
    if tile_index * tile >= n_tokens:
        return
    head = tl.program_id(1)
    m, d = tile_index * tile + tl.arange(0, tile), tl.arange(0, head_dim)
    row_index = (start + m)[:, None]
    query_pointers = q + row_index * q_stride + head * head_dim + d[None, :]
    query = tl.load(query_pointers, mask=m[:, None] < n_tokens, other=0.0)
    factor = _LOG2_E
    row = tl.load(slots + group) * heads + head
    if causal:
        first_key = start * k_stride + head * head_dim
        end = tl.minimum(n_tokens, (tile_index + 1) * tile)
    else:
        first_key, end = row * n_keys * k_stride, n_keys
    if int8:
        scale = tl.load(k_scale + row * head_dim + d)
        query = (query * scale[None, :] * _QUERY_SCALE).to(query.dtype)
        factor = _LOG2_E / _QUERY_SCALE
    peak = tl.full((tile,), float("-inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    acc = tl.zeros((tile, head_dim), tl.float32)
    for begin in range(0, end, block):
        n = begin + tl.arange(0, block)
        offsets = first_key + n[:, None] * k_stride + d[None, :]
        key_mask = n < end
        key = tl.load(k + offsets, mask=key_mask[:, None], other=0).to(query.dtype)
        score = tl.dot(query, tl.trans(key)) * factor
        mask = key_mask[None, :] & (n[None, :] <= m[:, None]) if causal else key_mask[None, :]
        score = tl.where(mask, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weights = tl.exp2(score - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        value = tl.load(v + offsets, mask=key_mask[:, None], other=0).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), value, acc * rescale[:, None])
        peak = new_peak
    acc = acc / total[:, None]
    if int8:
        acc = acc * tl.load(v_scale + row * head_dim + d)[None, :]
    width = heads * head_dim
    pointers = out + row_index * width + head * head_dim + d[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=m[:, None] < n_tokens)


def attend_to_texts(qkv: torch.Tensor, heads: int, groups: SlotGroups) -> torch.Tensor:
    """Compute `reference_ops.self_attention` of whole texts; write no cache.

    Args:
        qkv: (n, 3 * d).
        heads: the number of heads.
        groups: the texts.
    """
    width = qkv.shape[1] // 3
    tensors = (qkv, qkv[:, width:], qkv[:, 2 * width :], qkv, qkv)
    return _attend(tensors, heads, groups, 0, (3 * width, 3 * width), causal=True, int8=False)


def attend_to_audio(q: torch.Tensor, cross: CrossKV, groups: SlotGroups) -> torch.Tensor:
    """Compute `reference_ops.cross_attention` of whole texts.

    Args:
        q: (n, d).
        cross: the cache of every slot.
        groups: the texts.
    """
    _, heads, n_keys, head_dim = cross.k.shape
    int8 = cross.k_scale is not None
    scales = (cross.k_scale, cross.v_scale) if int8 else (q, q)
    tensors = (q, cross.k, cross.v, *scales)
    return _attend(tensors, heads, groups, n_keys, (q.shape[1], head_dim), causal=False, int8=int8)


def _attend(
    tensors: tuple[torch.Tensor | None, ...],
    heads: int,
    groups: SlotGroups,
    n_keys: int,
    strides: tuple[int, int],
    *,
    causal: bool,
    int8: bool,
) -> torch.Tensor:
    q, k = tensors[:2]
    assert q is not None and q.is_contiguous() and k is not None and (causal or k.is_contiguous())
    n_tokens, n_groups, width = len(q), len(groups.slots), q.shape[1] // (3 if causal else 1)
    out = torch.empty((n_tokens, width), dtype=q.dtype, device=q.device)
    group_tensors = (groups.slots, groups.first, groups.count)
    launch(texts_kernel, triton.cdiv(n_tokens, _TILE) + n_groups, heads)(
        *tensors,
        *group_tensors,
        out,
        n_groups,
        heads,
        n_keys,
        *strides,
        causal=causal,
        int8=int8,
        padded_groups=max(_GROUPS, triton.next_power_of_2(n_groups)),
        tile=_TILE,
        block=_BLOCK,
        head_dim=width // heads,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
