"""Pack INT8 weights in tensor-core register order, for the skinny GEMM.

The order is that of the registers of `mma.sync` m16n8k16 (PTX ISA, "Matrix Fragments"). The
weights of a thread are adjacent, and a warp reads 512 consecutive bytes. Each warp sums one part
of the depth, one turn at a time.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import dataclasses

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from serve.native.kernels.fragments import mma_layout

OUTPUTS = gl.constexpr(16)  # outputs per tile
TURN = gl.constexpr(256)  # maximum depth of a turn: a thread has no registers for more


@dataclasses.dataclass(frozen=True)
class PackedConfig:
    """Compile-time parameters of `thin_kernel`."""

    depth: int
    part: int  # depth that one warp sums
    warps: int  # a power of two; only the first `parts` warps sum
    norm: bool  # whether a layer norm precedes the product; only for one row
    eps: float
    has_bias: bool
    gelu: bool
    has_residual: bool
    again: bool  # whether programs compute several tiles in turn
    pdl: bool

    @property
    def parts(self) -> int:
        """Number of parts, and of warps that sum."""
        return self.depth // self.part

    @property
    def turn(self) -> int:
        """Depth that a warp multiplies at a time."""
        return min(self.part, int(TURN.value))

    @property
    def turns(self) -> int:
        """Turns per part."""
        return self.part // self.turn

    @property
    def words(self) -> int:
        """Words of four weights that a warp reads per tile and turn."""
        return self.turn * 4

    @property
    def block(self) -> int:
        """The depth rounded up to a power of two."""
        return self.warps * self.part

    @property
    def each(self) -> int:
        """Adjacent numbers of a row that a thread normalises."""
        return max(1, min(8, self.block // (32 * self.warps)))


def pack(weight: torch.Tensor, part: int) -> torch.Tensor:
    """Reorder the weights of a matrix for `thin_kernel`.

    Args:
        weight: int8 (out, depth).
        part: the depth of a part, a multiple of 64.

    Returns:
        int8 (out / 16, depth / part, 16 * part); the last tile is padded with zeros.
    """
    n_out, depth = weight.shape
    whole = torch.nn.functional.pad(weight, (0, 0, 0, -n_out % OUTPUTS.value))
    # Output: 8 * upper + row. In a chunk of 64: 32 * i + 16 * outer + 8 * hi + 2 * lane + odd.
    # A thread has a row and a lane; its sixteen bytes run over i, odd, outer and hi.
    split = whole.view(-1, 2, 8, depth // part, part // 64, 2, 2, 2, 4, 2)
    #                  tile, upper, row, part, chunk, i, outer, hi, lane, odd
    return split.permute(0, 3, 4, 1, 2, 8, 5, 9, 6, 7).reshape(-1, depth // part, 16 * part)


@triton.constexpr_function
def _bits(begin: int, end: int) -> list[int]:
    """Return the powers of two in [begin, end)."""
    return [1 << i for i in range(begin.bit_length() - 1, end.bit_length() - 1)]


@triton.constexpr_function
def tile_layout(shape: PackedConfig) -> gl.BlockedLayout:
    """Make the layout of a tile's sums, (16, 8)."""
    return gl.BlockedLayout([1, 1], [16, 2], [1, shape.warps], [0, 1])


@triton.constexpr_function
def words_layout(shape: PackedConfig) -> gl.DistributedLinearLayout:
    """Make the layout of a program's loaded weights, (warps, words)."""
    registers = [[0, bit] for bit in _bits(1, 4) + _bits(128, shape.words)]
    warps = [[bit, 0] for bit in _bits(1, shape.warps)]
    lanes = [[0, bit] for bit in _bits(4, 128)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [shape.warps, shape.words])


@triton.constexpr_function
def rows_layout(shape: PackedConfig) -> gl.DistributedLinearLayout:
    """Make the layout of a turn's rows, (8, warps * turn), in tensor-core register order."""
    registers = [[0, bit] for bit in [1, 8, *_bits(16, shape.turn)]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[0, bit * shape.turn] for bit in _bits(1, shape.warps)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, shape.warps * shape.turn])


@gluon.jit
def _halves(words) -> gl.tensor:
    """Convert int32 (…) of four int8 each to float16 (…, 2, 2), byte j at [j % 2, j // 2], exactly.

    The float16 with the bits 0x6400 | u is 1024 + u. It converts two words at once, because each
    register of an operand holds one number of either word.
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
def weights(words, shape: gl.constexpr) -> gl.tensor:
    """Make the left operand of a turn's loaded weights, (warps, 16, turn)."""
    warps: gl.constexpr = shape.warps
    turn: gl.constexpr = shape.turn
    chunks: gl.constexpr = turn // 64
    split = gl.reshape(_halves(words), [warps, chunks, 2, 8, 4, 2, 2, 2, 2])
    ordered = gl.permute(split, [0, 2, 3, 1, 5, 8, 7, 4, 6])
    layout: gl.constexpr = gl.DotOperandLayout(0, mma_layout(warps), 2)
    return gl.convert_layout(gl.reshape(ordered, [warps, 16, turn]), layout, assert_trivial=True)


@gluon.jit
def operand(rows, shape: gl.constexpr) -> gl.tensor:
    """Make the right operand (warps, turn, 8) of a turn's rows (8, warps * turn)."""
    folded = gl.permute(gl.reshape(rows, [8, shape.warps, shape.turn]), [1, 2, 0])
    layout: gl.constexpr = gl.DotOperandLayout(1, mma_layout(shape.warps), 2)
    return gl.convert_layout(folded, layout, assert_trivial=True)
