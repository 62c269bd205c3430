"""Compute the encoder's self-attention on Hopper with a Gluon kernel (FlashAttention-3's schedule).

A persistent program has one warp that starts bulk copies of keys, values and queries. Two or three
warpgroups attend, with 64 queries each. A warpgroup overlaps the products of the next keys and the
last values with its softmax. Warpgroups take turns to multiply (ping-pong); otherwise all would
multiply at the same time, and then all compute softmax at the same time.

A query's result depends on its window alone. The order of key blocks is the same for any number of
warpgroups: first the last block, which alone needs a mask, then the others.

Sources: Shah et al., "FlashAttention-3" (2024), section 3; Milakov and Gimelshein (2018) for the
running maximum.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, no-any-return"

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from serve.native.kernels.launch import launch

_DIM = gl.constexpr(64)  # dimensions per head
_QUERIES = gl.constexpr(64)  # queries per warpgroup
_KEYS = gl.constexpr(128)  # keys per block
_STAGES = gl.constexpr(3)  # blocks in shared memory, loaded or loading
_REGISTERS = {2: 240, 3: 160}  # registers of an attending thread, by warpgroups
_COPYING_REGISTERS = gl.constexpr(24)
_ROUND_US = {2: 16, 3: 21}  # time in which all programs compute a tile each, on an H200
_LOG2_E = gl.constexpr(1.4426950408889634)


@aggregate
class _Ring:
    """Pieces of shared memory, each with a barrier `there` (loaded) and a barrier `free`."""

    pieces: gl.shared_memory_descriptor
    there: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @triton.constexpr_function
    def __init__(
        self,
        pieces: gl.shared_memory_descriptor,
        there: gl.shared_memory_descriptor,
        free: gl.shared_memory_descriptor,
    ) -> None:
        self.pieces = pieces
        self.there = there
        self.free = free


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr) -> gl.shared_memory_descriptor:
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def _ring(source: tma.tensor_descriptor, number: gl.constexpr, readers: gl.constexpr) -> _Ring:
    """Allocate a ring of blocks of a descriptor; a block is free after all readers arrive."""
    shape: gl.constexpr = [number] + source.block_type.shape
    pieces = gl.allocate_shared_memory(source.dtype, shape, source.layout)
    return _Ring(pieces, _barriers(number, 1), _barriers(number, readers))


@gluon.jit
def _fetch(source: tma.tensor_descriptor, at: gl.tuple, ring: _Ring, i: int, phase: int) -> None:
    """Wait until a piece is free, and start the copy of a block into it."""
    shape: gl.constexpr = source.block_type.shape
    mbarrier.wait(ring.free.index(i), phase)
    mbarrier.expect(ring.there.index(i), shape[1] * shape[2] * 2)
    tma.async_copy_global_to_shared(source, at, ring.there.index(i), ring.pieces.index(i))


@gluon.jit
def _arrived(ring: _Ring, i: int, phase: int) -> gl.shared_memory_descriptor:
    """Wait for a piece to be loaded, and return it."""
    mbarrier.wait(ring.there.index(i), phase)
    piece = ring.pieces.index(i)
    return piece.reshape((piece.shape[1], piece.shape[2]))


@gluon.jit
def _place(tile: int, time: int, heads: int, groups: gl.constexpr) -> tuple[int, int, int]:
    """Return (window, head, first query) of a tile."""
    tiles = (time + groups * _QUERIES - 1) // (groups * _QUERIES)
    return tile // (heads * tiles), tile // tiles % heads, tile % tiles * (groups * _QUERIES)


@gluon.jit
def _next(stage: int, phase: int) -> tuple[int, int]:
    stage += 1
    if stage == _STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _copy(
    queries: tma.tensor_descriptor,
    keys: tma.tensor_descriptor,
    q: _Ring,
    k: _Ring,
    v: _Ring,
    tiles: int,
    heads: int,
    time: int,
    groups: gl.constexpr,
) -> None:
    """Copy the queries, keys and values of all tiles as pieces become free."""
    blocks = (time + _KEYS - 1) // _KEYS
    stage = 0
    phase = 1  # all pieces are free at first
    q_phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        window, head, first = _place(tile, time, heads, groups)
        for group in gl.static_range(groups):
            query = first + group * _QUERIES
            _fetch(queries, [window, query, head * _DIM], q, group, q_phase)
        q_phase ^= 1
        for block in range(blocks):
            key = gl.where(block == 0, blocks - 1, block - 1) * _KEYS
            _fetch(keys, [window, key, (heads + head) * _DIM], k, stage, phase)
            _fetch(keys, [window, key, (2 * heads + head) * _DIM], v, stage, phase)
            stage, phase = _next(stage, phase)


@gluon.jit
def _own_sums(weights) -> gl.tensor:
    """Sum each thread's weights of each query, (64, 4); threads are added only at the end."""
    return gl.sum(gl.sum(weights.reshape([_QUERIES, _KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _weigh(scores, largest, sums) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Compute one block's part of the softmax.

    Returns:
        The weights relative to the largest score so far; that score in base 2; each thread's sums
        of all weights so far; the factor for earlier weights.
    """
    now = gl.maximum(largest, gl.max(scores, 1) * _LOG2_E)
    fade = gl.exp2(largest - now)
    weights = gl.exp2(scores * _LOG2_E - gl.expand_dims(now, 1))
    layout: gl.constexpr = sums.type.layout
    return weights, now, sums * _of_rows(fade, layout) + _own_sums(weights), fade


@gluon.jit
def _attend(
    group: gl.constexpr,
    q_ring: _Ring,
    k_ring: _Ring,
    v_ring: _Ring,
    turns: gl.shared_memory_descriptor,
    out,
    tiles: int,
    heads: int,
    time: int,
    groups: gl.constexpr,
) -> None:
    """Attend with one warpgroup's queries of each tile; multiply only in its turn."""
    by_key: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    by_channel: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _DIM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, by_channel, 2)
    no_scores = gl.full([_QUERIES, _KEYS], 0.0, gl.float32, by_key)
    blocks = (time + _KEYS - 1) // _KEYS
    last_keys = (blocks - 1) * _KEYS + gl.arange(0, _KEYS, gl.SliceLayout(0, by_key))
    stage, phase, q_phase = 0, 0, 0
    turn = 1 if group == 0 else 0  # the first group does not wait
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        q = _arrived(q_ring, group, q_phase)
        q_phase ^= 1
        k = _arrived(k_ring, stage, phase)
        scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False)
        mbarrier.arrive(k_ring.free.index(stage))
        scores = gl.where(gl.expand_dims(last_keys < time, 0), scores, float("-inf"))
        largest = gl.full([_QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, by_key))
        sums = _own_sums(no_scores)
        weights, largest, sums, fade = _weigh(scores, largest, sums)
        weights = gl.convert_layout(weights.to(gl.float16), left)
        mixed = gl.full([_QUERIES, _DIM], 0.0, gl.float32, by_channel)
        v_stage, v_phase = stage, phase
        stage, phase = _next(stage, phase)
        for _ in range(1, blocks):
            k = _arrived(k_ring, stage, phase)
            v = _arrived(v_ring, v_stage, v_phase)
            mbarrier.wait(turns.index(group), turn)
            turn ^= 1
            scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mixed = warpgroup_mma(weights, v, mixed, is_async=True)
            mbarrier.arrive(turns.index((group + 1) % groups))
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_ring.free.index(stage))
            weights, largest, sums, fade = _weigh(scores, largest, sums)
            mixed = warpgroup_mma_wait(0, deps=[mixed])
            mbarrier.arrive(v_ring.free.index(v_stage))
            weights = gl.convert_layout(weights.to(gl.float16), left)
            mixed = mixed * _of_rows(fade, by_channel)
            v_stage, v_phase = stage, phase
            stage, phase = _next(stage, phase)
        mbarrier.arrive(q_ring.free.index(group))
        mixed = warpgroup_mma(weights, _arrived(v_ring, v_stage, v_phase), mixed)
        mbarrier.arrive(v_ring.free.index(v_stage))
        _store(mixed, sums, out, tile, group, heads, time, groups)


@gluon.jit
def _of_rows(numbers, layout: gl.constexpr) -> gl.tensor:
    """Broadcast one number per row in a matrix layout, (rows, 1)."""
    return gl.expand_dims(gl.convert_layout(numbers, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _store(
    mixed, sums, out, tile: int, group: gl.constexpr, heads: int, time: int, groups: gl.constexpr
) -> None:
    """Store a warpgroup's results of a tile, up to the end of the window."""
    window, head, first = _place(tile, time, heads, groups)
    width = heads * _DIM
    base = out + (window * time).to(gl.int64) * width + head * _DIM
    layout: gl.constexpr = mixed.type.layout
    mixed = mixed / _of_rows(gl.sum(sums, 1), layout)
    first += group * _QUERIES
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first + gl.arange(0, _QUERIES, gl.SliceLayout(1, rows))
    channel = gl.arange(0, _DIM, gl.SliceLayout(0, rows))
    at = base + (gl.expand_dims(row * width, 1) + gl.expand_dims(channel, 0))
    value = gl.convert_layout(mixed.to(gl.float16), rows)
    gl.store(at, value, mask=gl.expand_dims(row < time, 1))


@gluon.jit(do_not_specialize=("tiles", "time"))
def flash_kernel(
    queries: tma.tensor_descriptor,
    keys: tma.tensor_descriptor,
    out,
    tiles: int,
    heads: int,
    time: int,
    groups: gl.constexpr,
    registers: gl.constexpr,
) -> None:
    """Compute out (windows, time, heads * 64); both descriptors read concatenated q, k and v."""
    q = _ring(queries, groups, 1)
    k = _ring(keys, _STAGES, groups)
    v = _ring(keys, _STAGES, groups)
    turns = _barriers(groups, 1)
    if groups == 2:
        gl.warp_specialize(
            [
                (_attend, (0, q, k, v, turns, out, tiles, heads, time, groups)),
                (_attend, (1, q, k, v, turns, out, tiles, heads, time, groups)),
                (_copy, (queries, keys, q, k, v, tiles, heads, time, groups)),
            ],
            [4, 1],
            [registers, _COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, q, k, v, turns, out, tiles, heads, time, groups)),
                (_attend, (1, q, k, v, turns, out, tiles, heads, time, groups)),
                (_attend, (2, q, k, v, turns, out, tiles, heads, time, groups)),
                (_copy, (queries, keys, q, k, v, tiles, heads, time, groups)),
            ],
            [4, 4, 1],
            [registers, registers, _COPYING_REGISTERS],
        )


def flash_attention(qkv: torch.Tensor, heads: int, processors: int) -> torch.Tensor:
    """Compute `reference_ops.encoder_attention` in float16 on compute capability 9.0.

    Args:
        qkv: (batch, time, 3 * d), contiguous.
        heads: the number of heads, of 64 dimensions each.
        processors: the number of multiprocessors of the GPU.
    """
    batch, time, width = qkv.shape
    assert qkv.is_contiguous() and width == 3 * heads * _DIM.value
    out = torch.empty((batch, time, width // 3), dtype=qkv.dtype, device=qkv.device)
    tiles = {
        groups: batch * heads * triton.cdiv(time, groups * _QUERIES.value) for groups in _ROUND_US
    }
    groups = min(tiles, key=lambda n: triton.cdiv(tiles[n], processors) * _ROUND_US[n])
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    queries, keys = (
        TensorDescriptor(
            qkv, list(qkv.shape), [time * width, width, 1], [1, rows.value, _DIM.value], layout
        )
        for rows in (_QUERIES, _KEYS)
    )
    launch(flash_kernel, min(tiles[groups], processors))(
        queries, keys, out, tiles[groups], heads, time, groups, _REGISTERS[groups], num_warps=4
    )
    return out
