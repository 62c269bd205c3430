"""The tiles of products of many rows, and the depth of the parts in which all are summed.

What a part is decides a result's bits; no choice of a tile changes them. Tiles are those that
measured best on an H200.
"""

import dataclasses

import triton

FEW_ROWS = 64  # up to here a linear layer may end unfinished
_DEEP = 2560  # from so deep on, a part is 512 deep, else 256
_VOCABULARY = 8192  # from so many outputs on, there is work for everyone without parts
_WIDE_VOCABULARY = 256  # rows from which on their product is bound by arithmetic, too
_NARROW = 1280  # up to so many outputs, there are few programs


@dataclasses.dataclass(frozen=True)
class Tile:
    """The share of one program, and how it computes it."""

    block_m: int  # rows
    block_n: int  # outputs
    turn: int  # depth per turn
    warps: int
    stages: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As kernels take them."""
        return self.block_m, self.block_n, self.turn

    def grid(self, rows: int, n_out: int) -> tuple[int, int]:
        """Programs for so many rows and outputs."""
        return triton.cdiv(rows, self.block_m), triton.cdiv(n_out, self.block_n)


def part_of(depth: int) -> int:
    """Depth of the parts in which a matrix is summed, whatever the number of rows."""
    return min(512 if depth >= _DEEP else 256, depth & -depth)  # powers of two that divide it


def tile_of(rows: int, n_out: int, depth: int) -> Tile:
    """For weights as the engine stores them."""
    turn = min(128, part_of(depth))
    width = max(16, triton.next_power_of_2(rows))
    if n_out >= _VOCABULARY:
        return Tile(16, 128, turn, 4, 3) if rows <= 16 else Tile(min(128, width), 64, turn, 4, 3)
    most = 32 if n_out <= _NARROW and rows <= 128 else 64
    return Tile(min(most, width), 64, turn, 4, 4)


def gains_from_wide(rows: int, n_out: int) -> bool:
    """Tell whether so many rows make a product bound by arithmetic, and quicker in FP16."""
    return rows >= _WIDE_VOCABULARY if n_out >= _VOCABULARY else rows > FEW_ROWS


def wide_tile_of(rows: int, n_out: int, depth: int) -> Tile:
    """For weights that are kept in float16."""
    part = part_of(depth)
    narrow, long = n_out <= _NARROW, min(128, part)
    if narrow and rows <= 128:
        return Tile(32, 64, long, 4, 4)
    if rows <= (384 if narrow else 128) and n_out < _VOCABULARY:
        return Tile(64, 64, long, 4, 4)
    if rows >= 1024 and (depth >= _DEEP or n_out >= _VOCABULARY):
        return Tile(128, 128, min(64, part), 8, 4)
    return Tile(64, 128, min(64, part), 4, 4)
