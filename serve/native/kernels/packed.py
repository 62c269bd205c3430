"""Pack INT8 weights in tensor-core register order, for the skinny GEMM.

The order is that of the registers of `mma.sync` m16n8k16 (PTX ISA, "Matrix Fragments"). The
weights of a thread are adjacent, and a warp reads 512 consecutive bytes. Each warp sums one part
of the depth, `block_k` inputs at a time.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import dataclasses

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from serve.native.kernels.fragments import mma_layout

OUTPUTS = gl.constexpr(16)  # outputs per tile
MAX_BLOCK_K = gl.constexpr(256)  # inputs that a warp multiplies at a time; limited by registers


@dataclasses.dataclass(frozen=True)
class PackedConfig:
    """Compile-time parameters of `skinny_gemm_kernel`."""

    depth: int
    part: int  # depth that one warp sums
    warps: int  # a power of two; only the first `parts` warps sum
    norm: bool  # whether a layer norm precedes the product; only for one row
    eps: float
    has_bias: bool
    gelu: bool
    has_residual: bool
    persistent: bool  # whether programs compute several tiles in turn
    pdl: bool

    @property
    def parts(self) -> int:
        """Number of parts, and of warps that sum."""
        return self.depth // self.part

    @property
    def block_k(self) -> int:
        """Inputs that a warp multiplies at a time."""
        return min(self.part, int(MAX_BLOCK_K.value))

    @property
    def k_blocks(self) -> int:
        """Number of blocks per part."""
        return self.part // self.block_k

    @property
    def words(self) -> int:
        """Words of four weights that a warp reads per tile and block."""
        return self.block_k * 4

    @property
    def block(self) -> int:
        """The depth rounded up to a power of two."""
        return self.warps * self.part

    @property
    def per_thread(self) -> int:
        """Adjacent numbers of a row that a thread normalises."""
        return max(1, min(8, self.block // (32 * self.warps)))


def pack(weight: torch.Tensor, part: int) -> torch.Tensor:
    """Reorder the weights of a matrix for `skinny_gemm_kernel`.

    Args:
        weight: int8 (out, depth).
        part: the depth of a part, a multiple of 64.

    Returns:
        int8 (out / 16, depth / part, 16 * part); the last tile is padded with zeros.
    """
    n_out, depth = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n_out % OUTPUTS.value))
    # Output: 8 * upper + row. In a chunk of 64: 32 * i + 16 * outer + 8 * hi + 2 * lane + odd.
    # A thread has a row and a lane; its sixteen bytes run over i, odd, outer and hi.
    split = padded.view(-1, 2, 8, depth // part, part // 64, 2, 2, 2, 4, 2)
    #                  tile, upper, row, part, chunk, i, outer, hi, lane, odd
    return split.permute(0, 3, 4, 1, 2, 8, 5, 9, 6, 7).reshape(-1, depth // part, 16 * part)


@triton.constexpr_function
def _bits(begin: int, end: int) -> list[int]:
    """Return the powers of two in [begin, end)."""
    return [1 << i for i in range(begin.bit_length() - 1, end.bit_length() - 1)]


@triton.constexpr_function
def tile_layout(config: PackedConfig) -> gl.BlockedLayout:
    """Make the layout of a tile's sums, (16, 8)."""
    return gl.BlockedLayout([1, 1], [16, 2], [1, config.warps], [0, 1])


@triton.constexpr_function
def words_layout(config: PackedConfig) -> gl.DistributedLinearLayout:
    """Make the layout of a program's loaded weights, (warps, words)."""
    registers = [[0, bit] for bit in _bits(1, 4) + _bits(128, config.words)]
    warps = [[bit, 0] for bit in _bits(1, config.warps)]
    lanes = [[0, bit] for bit in _bits(4, 128)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [config.warps, config.words])


@triton.constexpr_function
def rows_layout(config: PackedConfig) -> gl.DistributedLinearLayout:
    """Make the layout of a block's rows, (8, warps * block_k), in tensor-core register order."""
    registers = [[0, bit] for bit in [1, 8, *_bits(16, config.block_k)]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[0, bit * config.block_k] for bit in _bits(1, config.warps)]
    shape = [8, config.warps * config.block_k]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.jit
def _int8_to_float16(words) -> gl.tensor:
    """Unpack the four int8 of each int32 to float16 (…, 2, 2); byte j goes to [j % 2, j // 2].

    The float16 with the bits 0x6400 | u is 1024 + u. One assembly block converts two consecutive
    words of a thread, because an operand register holds one value of each.
    """
    a, b, c, d = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, z, w, m;
        prmt.b32 x, $4, $5, 0x4400;
        prmt.b32 y, $4, $5, 0x5511;
        prmt.b32 z, $4, $5, 0x6622;
        prmt.b32 w, $4, $5, 0x7733;
        lop3.b32 x, x, 0x00ff00ff, 0x64806480, 0x6a;
        lop3.b32 y, y, 0x00ff00ff, 0x64806480, 0x6a;
        lop3.b32 z, z, 0x00ff00ff, 0x64806480, 0x6a;
        lop3.b32 w, w, 0x00ff00ff, 0x64806480, 0x6a;
        mov.b32 m, 0x64806480;
        sub.f16x2 $0, x, m;
        sub.f16x2 $1, y, m;
        sub.f16x2 $2, z, m;
        sub.f16x2 $3, w, m;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def weights_operand(words, config: gl.constexpr) -> gl.tensor:
    """Make the left operand of a block's loaded weights, (warps, 16, block_k)."""
    warps: gl.constexpr = config.warps
    block_k: gl.constexpr = config.block_k
    chunks: gl.constexpr = block_k // 64
    split = gl.reshape(_int8_to_float16(words), [warps, chunks, 2, 8, 4, 2, 2, 2, 2])
    ordered = gl.permute(split, [0, 2, 3, 1, 5, 8, 7, 4, 6])
    layout: gl.constexpr = gl.DotOperandLayout(0, mma_layout(warps), 2)
    return gl.convert_layout(gl.reshape(ordered, [warps, 16, block_k]), layout, assert_trivial=True)


@gluon.jit
def rows_operand(rows, config: gl.constexpr) -> gl.tensor:
    """Make the right operand (warps, block_k, 8) of a block's rows (8, warps * block_k)."""
    folded = gl.permute(gl.reshape(rows, [8, config.warps, config.block_k]), [1, 2, 0])
    layout: gl.constexpr = gl.DotOperandLayout(1, mma_layout(config.warps), 2)
    return gl.convert_layout(folded, layout, assert_trivial=True)
