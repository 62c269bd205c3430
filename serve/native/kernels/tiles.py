"""Choose tile sizes, and the depth of the parts in which products are summed.

The part determines a result's bits; the tile does not. The tiles were the fastest measured on an
H200.
"""

import dataclasses

import triton

FEW_ROWS = 64  # maximum rows of a linear layer that may end as partial sums
_DEEP = 2560  # minimum depth for parts of 512 instead of 256
_VOCABULARY = 8192  # minimum outputs that occupy the GPU without a split over the depth
_WIDE_VOCABULARY = 256  # minimum rows at which such a product is bound by arithmetic
_NARROW = 1280  # maximum outputs of a product that has few programs


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one program, and its launch options."""

    block_m: int  # rows
    block_n: int  # outputs
    turn: int  # depth per turn
    warps: int
    stages: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Parameters of the kernels: (block_m, block_n, turn)."""
        return self.block_m, self.block_n, self.turn

    def grid(self, rows: int, n_out: int) -> tuple[int, int]:
        """Return the number of programs along rows and outputs."""
        return triton.cdiv(rows, self.block_m), triton.cdiv(n_out, self.block_n)


def part_of(depth: int) -> int:
    """Return the depth of the parts in which a matrix is summed, for any number of rows."""
    return min(512 if depth >= _DEEP else 256, depth & -depth)  # the largest power of two in it


def tile_of(rows: int, n_out: int, depth: int) -> Tile:
    """Return the tile for weights in the engine's dtype."""
    turn = min(128, part_of(depth))
    width = max(16, triton.next_power_of_2(rows))
    if n_out >= _VOCABULARY:
        return Tile(16, 128, turn, 4, 3) if rows <= 16 else Tile(min(128, width), 64, turn, 4, 3)
    max_rows = 32 if n_out <= _NARROW and rows <= 128 else 64
    return Tile(min(max_rows, width), 64, turn, 4, 4)


def gains_from_wide(rows: int, n_out: int) -> bool:
    """Return whether a product of this many rows is bound by arithmetic and faster in FP16."""
    return rows >= _WIDE_VOCABULARY if n_out >= _VOCABULARY else rows > FEW_ROWS


def wide_tile_of(rows: int, n_out: int, depth: int) -> Tile:
    """Return the tile for weights that are kept in float16."""
    part = part_of(depth)
    narrow, long = n_out <= _NARROW, min(128, part)
    if narrow and rows <= 128:
        return Tile(32, 64, long, 4, 4)
    if rows <= (384 if narrow else 128) and n_out < _VOCABULARY:
        return Tile(64, 64, long, 4, 4)
    if rows >= 1024 and (depth >= _DEEP or n_out >= _VOCABULARY):
        return Tile(128, 128, min(64, part), 8, 4)
    return Tile(64, 128, min(64, part), 4, 4)
