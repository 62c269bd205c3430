"""Compute the encoder's self-attention on Hopper with a Gluon kernel (FlashAttention-3's schedule).

In each persistent program, one warp starts bulk copies of keys, values and queries. Two or three
warpgroups compute attention, for 64 queries each. A warpgroup launches the products of the next
keys and the last values together. Warpgroups take turns to multiply (ping-pong), so that one
multiplies while another computes its softmax.

A query's result depends on its window alone. The order of key blocks is the same for any number of
warpgroups: first the last block, the only one that needs a mask, then the others.

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
_REGISTERS = {2: 240, 3: 160}  # registers per thread that attends, by number of warpgroups
_COPYING_REGISTERS = gl.constexpr(24)
_ROUND_US = {2: 16, 3: 21}  # measured time per tile on an H200, by number of warpgroups
_LOG2_E = gl.constexpr(1.4426950408889634)


@aggregate
class _Ring:
    """A ring of buffers in shared memory, each with the barriers `loaded` and `free`."""

    buffers: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @triton.constexpr_function
    def __init__(
        self,
        buffers: gl.shared_memory_descriptor,
        loaded: gl.shared_memory_descriptor,
        free: gl.shared_memory_descriptor,
    ) -> None:
        self.buffers = buffers
        self.loaded = loaded
        self.free = free


@gluon.jit
def _new_barriers(size: gl.constexpr, count: gl.constexpr) -> gl.shared_memory_descriptor:
    barriers = gl.allocate_shared_memory(gl.int64, [size, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(size):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def _new_ring(source: tma.tensor_descriptor, size: gl.constexpr, readers: gl.constexpr) -> _Ring:
    """Allocate a ring of buffers for a descriptor's blocks; `readers` arrivals free a buffer."""
    shape: gl.constexpr = [size] + source.block_type.shape
    buffers = gl.allocate_shared_memory(source.dtype, shape, source.layout)
    return _Ring(buffers, _new_barriers(size, 1), _new_barriers(size, readers))


@gluon.jit
def _fetch(
    source: tma.tensor_descriptor, coordinates: gl.tuple, ring: _Ring, i: int, phase: int
) -> None:
    """Wait until a buffer is free, and start the copy of a block into it."""
    shape: gl.constexpr = source.block_type.shape
    mbarrier.wait(ring.free.index(i), phase)
    mbarrier.expect(ring.loaded.index(i), shape[1] * shape[2] * 2)
    buffer = ring.buffers.index(i)
    tma.async_copy_global_to_shared(source, coordinates, ring.loaded.index(i), buffer)


@gluon.jit
def _wait_loaded(ring: _Ring, i: int, phase: int) -> gl.shared_memory_descriptor:
    """Wait until a buffer is loaded, and return it as a matrix."""
    mbarrier.wait(ring.loaded.index(i), phase)
    buffer = ring.buffers.index(i)
    return buffer.reshape((buffer.shape[1], buffer.shape[2]))


@gluon.jit
def _tile_origin(tile: int, time: int, heads: int, groups: gl.constexpr) -> tuple[int, int, int]:
    """Return (window, head, first query) of a tile."""
    tiles = (time + groups * _QUERIES - 1) // (groups * _QUERIES)
    return tile // (heads * tiles), tile // tiles % heads, tile % tiles * (groups * _QUERIES)


@gluon.jit
def _next_stage(stage: int, phase: int) -> tuple[int, int]:
    stage += 1
    if stage == _STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _copy(
    queries: tma.tensor_descriptor,
    keys: tma.tensor_descriptor,
    q_ring: _Ring,
    k_ring: _Ring,
    v_ring: _Ring,
    tiles: int,
    heads: int,
    time: int,
    groups: gl.constexpr,
) -> None:
    """Copy the queries, keys and values of all tiles as buffers become free."""
    blocks = (time + _KEYS - 1) // _KEYS
    stage = 0
    phase = 1  # all buffers are free at first
    q_phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        window, head, first_query = _tile_origin(tile, time, heads, groups)
        for group in gl.static_range(groups):
            query = first_query + group * _QUERIES
            _fetch(queries, [window, query, head * _DIM], q_ring, group, q_phase)
        q_phase ^= 1
        for block in range(blocks):
            key = gl.where(block == 0, blocks - 1, block - 1) * _KEYS
            _fetch(keys, [window, key, (heads + head) * _DIM], k_ring, stage, phase)
            _fetch(keys, [window, key, (2 * heads + head) * _DIM], v_ring, stage, phase)
            stage, phase = _next_stage(stage, phase)


@gluon.jit
def _sums_per_thread(weights) -> gl.tensor:
    """Sum each thread's weights per query, (64, 4); `_store` adds the threads' sums."""
    return gl.sum(gl.sum(weights.reshape([_QUERIES, _KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax_block(scores, largest, sums) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Compute the softmax numerators of one block of keys.

    Returns:
        The numerators relative to the largest score so far; that score, times log2(e); each
        thread's sums of all numerators so far; the factor that rescales earlier results.
    """
    new_largest = gl.maximum(largest, gl.max(scores, 1) * _LOG2_E)
    rescale = gl.exp2(largest - new_largest)
    weights = gl.exp2(scores * _LOG2_E - gl.expand_dims(new_largest, 1))
    layout: gl.constexpr = sums.type.layout
    sums = sums * _broadcast_rows(rescale, layout) + _sums_per_thread(weights)
    return weights, new_largest, sums, rescale


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
    """Compute the attention of one warpgroup's queries in each tile; multiply only in its turn."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    zero_scores = gl.full([_QUERIES, _KEYS], 0.0, gl.float32, scores_layout)
    blocks = (time + _KEYS - 1) // _KEYS
    last_keys = (blocks - 1) * _KEYS + gl.arange(0, _KEYS, gl.SliceLayout(0, scores_layout))
    stage, phase, q_phase = 0, 0, 0
    turn = 1 if group == 0 else 0  # the first group does not wait
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        q = _wait_loaded(q_ring, group, q_phase)
        q_phase ^= 1
        k = _wait_loaded(k_ring, stage, phase)
        scores = warpgroup_mma(q, k.permute((1, 0)), zero_scores, use_acc=False)
        mbarrier.arrive(k_ring.free.index(stage))
        scores = gl.where(gl.expand_dims(last_keys < time, 0), scores, float("-inf"))
        largest = gl.full([_QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
        sums = _sums_per_thread(zero_scores)
        weights, largest, sums, rescale = _softmax_block(scores, largest, sums)
        weights = gl.convert_layout(weights.to(gl.float16), weights_layout)
        acc = gl.full([_QUERIES, _DIM], 0.0, gl.float32, acc_layout)
        v_stage, v_phase = stage, phase
        stage, phase = _next_stage(stage, phase)
        for _ in range(1, blocks):
            k = _wait_loaded(k_ring, stage, phase)
            v = _wait_loaded(v_ring, v_stage, v_phase)
            mbarrier.wait(turns.index(group), turn)
            turn ^= 1
            scores = warpgroup_mma(q, k.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            acc = warpgroup_mma(weights, v, acc, is_async=True)
            mbarrier.arrive(turns.index((group + 1) % groups))
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_ring.free.index(stage))
            weights, largest, sums, rescale = _softmax_block(scores, largest, sums)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_ring.free.index(v_stage))
            weights = gl.convert_layout(weights.to(gl.float16), weights_layout)
            acc = acc * _broadcast_rows(rescale, acc_layout)
            v_stage, v_phase = stage, phase
            stage, phase = _next_stage(stage, phase)
        mbarrier.arrive(q_ring.free.index(group))
        acc = warpgroup_mma(weights, _wait_loaded(v_ring, v_stage, v_phase), acc)
        mbarrier.arrive(v_ring.free.index(v_stage))
        _store(acc, sums, out, tile, group, heads, time, groups)


@gluon.jit
def _broadcast_rows(values, layout: gl.constexpr) -> gl.tensor:
    """Broadcast one number per row in a matrix layout, (rows, 1)."""
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _store(
    acc, sums, out, tile: int, group: gl.constexpr, heads: int, time: int, groups: gl.constexpr
) -> None:
    """Store a warpgroup's results of a tile, up to the end of the window."""
    window, head, first_query = _tile_origin(tile, time, heads, groups)
    width = heads * _DIM
    base = out + (window * time).to(gl.int64) * width + head * _DIM
    acc_layout: gl.constexpr = acc.type.layout
    acc = acc / _broadcast_rows(gl.sum(sums, 1), acc_layout)
    first_query += group * _QUERIES
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first_query + gl.arange(0, _QUERIES, gl.SliceLayout(1, store_layout))
    channel = gl.arange(0, _DIM, gl.SliceLayout(0, store_layout))
    pointers = base + (gl.expand_dims(row * width, 1) + gl.expand_dims(channel, 0))
    value = gl.convert_layout(acc.to(gl.float16), store_layout)
    gl.store(pointers, value, mask=gl.expand_dims(row < time, 1))


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
    q_ring = _new_ring(queries, groups, 1)
    k_ring = _new_ring(keys, _STAGES, groups)
    v_ring = _new_ring(keys, _STAGES, groups)
    turns = _new_barriers(groups, 1)
    if groups == 2:
        gl.warp_specialize(
            [
                (_attend, (0, q_ring, k_ring, v_ring, turns, out, tiles, heads, time, groups)),
                (_attend, (1, q_ring, k_ring, v_ring, turns, out, tiles, heads, time, groups)),
                (_copy, (queries, keys, q_ring, k_ring, v_ring, tiles, heads, time, groups)),
            ],
            [4, 1],
            [registers, _COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, q_ring, k_ring, v_ring, turns, out, tiles, heads, time, groups)),
                (_attend, (1, q_ring, k_ring, v_ring, turns, out, tiles, heads, time, groups)),
                (_attend, (2, q_ring, k_ring, v_ring, turns, out, tiles, heads, time, groups)),
                (_copy, (queries, keys, q_ring, k_ring, v_ring, tiles, heads, time, groups)),
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
