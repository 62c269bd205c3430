"""Compute the dynamic time warping of many windows with a Triton-language kernel.

`serve.speech.words.monotonic_path` is the reference implementation. If all requests ask for word
timestamps, the host's threads are too slow for a GPU: they share the interpreter's lock with the
thread that launches the GPU's work.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch

_MIN_FRAMES = 512  # frames that the kernel is compiled for


@triton.jit
def _minimum(a, b) -> tl.tensor:
    return tl.minimum(a, b)


@triton.jit
def _walk_back(codes, begins, rows, last, block: tl.constexpr) -> None:
    """Trace the path back from the last frame of the last row; store each row's first frame."""
    column = tl.arange(0, block)
    frame = last
    for step in range(rows - 1):
        row = rows - 1 - step
        code = tl.load(codes + row * block + column)
        frame = tl.max(tl.where(((code & 1) != 0) & (column <= frame), column, -1), 0)
        tl.store(begins + row, frame.to(tl.int64))
        frame -= tl.max(tl.where((column == frame) & (code >= 2), 1, 0), 0)
    tl.store(begins, (last * 0).to(tl.int64))


@triton.jit(do_not_specialize=("n_rows", "n_frames"))
def warp_kernel(
    matrix,
    first,
    count,
    frames,
    costs,
    codes,
    begins,
    n_rows: int,
    n_frames: int,
    block: tl.constexpr,
) -> None:
    """Find the path through rows [first, first + count) and the first `frames` of one window.

    matrix is (windows, n_rows, n_frames) and begins int64 (windows, n_rows). Costs, float64
    (windows, block + 1), and codes, int8 (windows, n_rows, block), are scratch memory.
    """
    window = tl.program_id(0).to(tl.int64)
    first_row = tl.load(first + window)
    rows = tl.load(count + window).to(tl.int32)
    last = tl.load(frames + window).to(tl.int32) - 1
    column = tl.arange(0, block)
    mask = column <= last
    window_weights = matrix + (window * n_rows + first_row) * n_frames
    window_costs = costs + window * (block + 1)
    window_codes = codes + window * n_rows * block
    window_begins = begins + window * n_rows
    infinite = tl.full([block], float("inf"), tl.float64)
    diagonal = tl.where(column == 0, 0.0, infinite)
    above = infinite
    for row in range(rows):
        pointers = window_weights + row * n_frames + column
        weights = tl.load(pointers, mask=mask, other=0.0).to(tl.float64)
        prefix_sum = -tl.cumsum(weights, 0)
        best = tl.where(diagonal == above, infinite, tl.minimum(diagonal, above))
        cost = prefix_sum + tl.associative_scan(best - (prefix_sum + weights), 0, _minimum)
        tl.store(window_costs + 1 + column, cost)
        tl.debug_barrier()
        left = tl.load(window_costs + column, mask=column > 0, other=float("inf"))
        enters = (tl.minimum(diagonal, above) < left) & (diagonal != above)
        code = enters.to(tl.int8) + 2 * (diagonal < above).to(tl.int8)
        tl.store(window_codes + row * block + column, code)
        tl.debug_barrier()
        diagonal = left
        above = cost
    _walk_back(window_codes, window_begins, rows, last, block)


def warp(
    matrix: torch.Tensor, first: torch.Tensor, count: torch.Tensor, frames: torch.Tensor
) -> torch.Tensor:
    """Find the monotonic path of largest weight through each window.

    Args:
        matrix: float32 (windows, rows, frames).
        first, count: int64 (windows,), each window's rows.
        frames: int64 (windows,), the number of frames of each window.

    Returns:
        The first frame of each row, int64 (windows, rows); only the first `count` are defined.
    """
    assert matrix.is_contiguous()
    windows, n_rows, n_frames = matrix.shape
    block = max(_MIN_FRAMES, triton.next_power_of_2(n_frames))
    costs = torch.empty((windows, block + 1), dtype=torch.float64, device=matrix.device)
    codes = torch.empty((windows, n_rows, block), dtype=torch.int8, device=matrix.device)
    begins = torch.zeros((windows, n_rows), dtype=torch.int64, device=matrix.device)
    launch(warp_kernel, windows)(
        matrix, first, count, frames, costs, codes, begins, n_rows, n_frames, block, num_warps=8
    )
    return begins
