"""Normalise and smooth the attention of word alignment with Triton-language kernels.

The reference is `serve.native.alignment.smoothed` and a mean over heads. Plain torch moves all
weights through memory about fifty times, mostly for the median; these kernels do so four times.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch

_TILE = 4096  # weights that a program holds: those of all tokens in some frames
_FRAMES = 512  # frames that a program averages
# Kernels are compiled only for these sizes, because a request waits for a compilation.
_TOKENS = (64, 256, 512)  # padded tokens per program
_MAX_FRAMES = 2048
_SIZES = ("n_heads", "n_tokens", "n_frames")


@triton.jit(do_not_specialize=_SIZES)
def sums_kernel(
    scores, tokens, frames, sums, n_heads: int, n_tokens: int, n_frames: int, block: tl.constexpr
) -> None:
    """Store the peak of one row over its window's frames, and the sum of exp(score - peak).

    scores (windows, n_heads, n_tokens, n_frames); sums (windows, n_heads, n_tokens, 2).
    """
    row = tl.program_id(0).to(tl.int64)
    window = row // (n_heads * n_tokens)
    if row % n_tokens < tl.load(tokens + window):
        at = tl.arange(0, block)
        there = at < tl.load(frames + window)
        x = tl.load(scores + row * n_frames + at, mask=there, other=float("-inf"))
        peak = tl.max(x, 0)
        tl.store(sums + 2 * row, peak)
        tl.store(sums + 2 * row + 1, tl.sum(tl.exp(x - peak), 0))


@triton.jit(do_not_specialize=_SIZES)
def score_kernel(
    scores,
    tokens,
    frames,
    sums,
    n_heads: int,
    n_tokens: int,
    n_frames: int,
    min_divisor: tl.constexpr,
    tokens_padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Replace one head's scores in some frames by standardised softmax weights.

    In each frame a token's weight becomes its distance from the mean of all tokens, in standard
    deviations.
    """
    head = tl.program_id(0).to(tl.int64)
    window = head // n_heads
    count = tl.load(tokens + window).to(tl.int32)
    token = tl.arange(0, tokens_padded)[:, None]
    at = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    fed = token < count
    there = fed & (at < tl.load(frames + window).to(tl.int32))
    rows = sums + 2 * head * n_tokens + 2 * token
    peak = tl.load(rows, mask=fed, other=0.0)
    sum = tl.load(rows + 1, mask=fed, other=1.0)
    where = scores + head * n_tokens * n_frames + (token * n_frames + at)
    x = tl.load(where, mask=there, other=float("-inf"))
    weights = tl.exp(x - peak) / sum
    weights = weights / tl.maximum(tl.max(weights, 0), min_divisor)[None, :]
    away = tl.where(fed, weights - (tl.sum(weights, 0) / count)[None, :], 0.0)
    deviation = tl.sqrt(tl.sum(away * away, 0) / count)
    scored = away / tl.maximum(deviation, min_divisor)[None, :]
    tl.store(where, scored, mask=there)


@triton.jit
def _sorted(a, b) -> tuple[tl.tensor, tl.tensor]:
    return tl.minimum(a, b), tl.maximum(a, b)


@triton.jit
def _scored(row, at, last) -> tl.tensor:
    """Load a row's scores at some frames, mirrored at both ends of the window."""
    at = tl.abs(at)
    at = tl.where(at > last, 2 * last - at, at)
    return tl.load(row + tl.maximum(at, 0))


@triton.jit
def _median(row, at, last) -> tl.tensor:
    """Return the median of seven adjacent frames, by the exchanges of `alignment.median_of_7`."""
    a, b, c = _scored(row, at - 3, last), _scored(row, at - 2, last), _scored(row, at - 1, last)
    d, e, f = _scored(row, at, last), _scored(row, at + 1, last), _scored(row, at + 2, last)
    g = _scored(row, at + 3, last)
    a, f = _sorted(a, f)
    a, d = _sorted(a, d)
    b, g = _sorted(b, g)
    c, e = _sorted(c, e)
    a, b = _sorted(a, b)
    d, f = _sorted(d, f)
    c, g = _sorted(c, g)
    c, d = _sorted(c, d)
    d, g = _sorted(d, g)
    e, f = _sorted(e, f)
    b, e = _sorted(b, e)
    b, d = _sorted(b, d)
    d, e = _sorted(d, e)
    return d


@triton.jit(do_not_specialize=_SIZES)
def mean_kernel(
    scored, tokens, frames, matrix, n_heads: int, n_tokens: int, n_frames: int, block: tl.constexpr
) -> None:
    """Average a token's medians over adjacent frames over the heads.

    scored is `scores` after `score_kernel`; matrix (windows, n_tokens, n_frames).
    """
    row = tl.program_id(0).to(tl.int64)
    window, token = row // n_tokens, row % n_tokens
    if token < tl.load(tokens + window):
        last = tl.load(frames + window).to(tl.int32) - 1
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = tl.minimum(at, last)
        total = tl.zeros((block,), tl.float32)
        for head in range(n_heads):
            mine = scored + ((window * n_heads + head) * n_tokens + token) * n_frames
            if last >= 3:
                total += _median(mine, inside, last)
            else:  # too short to be mirrored at its ends
                total += tl.load(mine + inside)
        tl.store(matrix + row * n_frames + at, total / n_heads, mask=at <= last)


def smooth(
    scores: torch.Tensor, tokens: torch.Tensor, frames: torch.Tensor, min_divisor: float
) -> torch.Tensor:
    """Compute the mean over heads of `serve.native.alignment.smoothed`.

    Args:
        scores: float32 (windows, heads, tokens, frames), overwritten.
        tokens, frames: int64 (windows,), the numbers of tokens and frames of each window.
        min_divisor: avoids a division by 0 where no token attends.

    Returns:
        float32 (windows, tokens, frames); undefined beyond a window's tokens and frames.
    """
    assert scores.is_contiguous()
    windows, heads, n_tokens, n_frames = scores.shape
    sizes = (heads, n_tokens, n_frames)
    sums = torch.empty((windows, heads, n_tokens, 2), device=scores.device)
    matrix = torch.empty((windows, n_tokens, n_frames), device=scores.device)
    padded = next(size for size in _TOKENS if n_tokens <= size)
    block = max(16, _TILE // padded)
    assert n_frames <= _MAX_FRAMES
    launch(sums_kernel, windows * heads * n_tokens)(
        scores, tokens, frames, sums, *sizes, _MAX_FRAMES, num_warps=4
    )
    launch(score_kernel, windows * heads, triton.cdiv(n_frames, block))(
        scores, tokens, frames, sums, *sizes, min_divisor, padded, block, num_warps=8
    )
    launch(mean_kernel, windows * n_tokens, triton.cdiv(n_frames, _FRAMES))(
        scores, tokens, frames, matrix, *sizes, _FRAMES, num_warps=4
    )
    return matrix
