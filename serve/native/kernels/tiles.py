"""Choose tile sizes, and the depth of the parts in which products are summed.

The depth of the parts determines the bits of a result; the tile does not. The tiles were the
fastest measured on an H200.
"""

import dataclasses

import triton

FEW_ROWS = 64  # maximum rows of a linear layer that may end as partial sums
_MIN_LARGE_PART_DEPTH = 2560  # minimum depth for parts of 512 instead of 256
_MANY_OUTPUTS = 8192  # minimum outputs that occupy the GPU without a split over the depth
_MIN_FLOAT16_ROWS = 256  # rows at which a product with so many outputs is bound by arithmetic
_FEW_OUTPUTS = 1280  # maximum outputs of a product that has few programs


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one program, and its launch options."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inputs per iteration
    warps: int
    stages: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Parameters of the kernels: (block_m, block_n, block_k)."""
        return self.block_m, self.block_n, self.block_k

    def grid(self, rows: int, n_out: int) -> tuple[int, int]:
        """Return the number of programs along rows and outputs."""
        return triton.cdiv(rows, self.block_m), triton.cdiv(n_out, self.block_n)


def split_depth(depth: int) -> int:
    """Return the depth of a partial sum (split-K); it does not depend on the number of rows."""
    # `depth & -depth` is the largest power of two in `depth`.
    return min(512 if depth >= _MIN_LARGE_PART_DEPTH else 256, depth & -depth)


def choose_tile(rows: int, n_out: int, depth: int) -> Tile:
    """Return the tile for weights in the engine's dtype."""
    block_k = min(128, split_depth(depth))
    padded_rows = max(16, triton.next_power_of_2(rows))
    if n_out >= _MANY_OUTPUTS:
        if rows <= 16:
            return Tile(16, 128, block_k, 4, 3)
        return Tile(min(128, padded_rows), 64, block_k, 4, 3)
    max_rows = 32 if n_out <= _FEW_OUTPUTS and rows <= 128 else 64
    return Tile(min(max_rows, padded_rows), 64, block_k, 4, 4)


def is_faster_in_float16(rows: int, n_out: int) -> bool:
    """Return whether a product of this many rows is faster with weights kept in float16."""
    return rows >= _MIN_FLOAT16_ROWS if n_out >= _MANY_OUTPUTS else rows > FEW_ROWS


def choose_float16_tile(rows: int, n_out: int, depth: int) -> Tile:
    """Return the tile for weights that are kept in float16."""
    part = split_depth(depth)
    few_outputs, block_k = n_out <= _FEW_OUTPUTS, min(128, part)
    if few_outputs and rows <= 128:
        return Tile(32, 64, block_k, 4, 4)
    if rows <= (384 if few_outputs else 128) and n_out < _MANY_OUTPUTS:
        return Tile(64, 64, block_k, 4, 4)
    if rows >= 1024 and (depth >= _MIN_LARGE_PART_DEPTH or n_out >= _MANY_OUTPUTS):
        return Tile(128, 128, min(64, part), 8, 4)
    return Tile(64, 128, min(64, part), 4, 4)
