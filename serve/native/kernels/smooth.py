"""Normalise and smooth the attention of word alignment with Triton-language kernels.

The reference is `serve.native.alignment.smoothed` and a mean over heads. Plain torch moves all
weights through memory about fifty times, mostly for the median; these kernels do so four times.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch

_TILE = 4096  # weights that a program holds: all tokens of some frames
_FRAMES = 512  # frames that a program averages
# Kernels are compiled only for these sizes, because a request waits for a compilation.
_TOKENS = (64, 256, 512)  # padded tokens per program
_MAX_FRAMES = 2048
_SIZES = ("n_heads", "n_tokens", "n_frames")


@triton.jit(do_not_specialize=_SIZES)
def sums_kernel(
    scores, tokens, frames, sums, n_heads: int, n_tokens: int, n_frames: int, block: tl.constexpr
) -> None:
    """Store the highest score of one row over its window's frames, and the sum of exp(score - it).

    scores (windows, n_heads, n_tokens, n_frames); sums (windows, n_heads, n_tokens, 2).
    """
    row = tl.program_id(0).to(tl.int64)
    window = row // (n_heads * n_tokens)
    if row % n_tokens < tl.load(tokens + window):
        frame = tl.arange(0, block)
        mask = frame < tl.load(frames + window)
        x = tl.load(scores + row * n_frames + frame, mask=mask, other=float("-inf"))
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
    frame = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    is_token = token < count
    mask = is_token & (frame < tl.load(frames + window).to(tl.int32))
    sums_of_tokens = sums + 2 * head * n_tokens + 2 * token
    peak = tl.load(sums_of_tokens, mask=is_token, other=0.0)
    total = tl.load(sums_of_tokens + 1, mask=is_token, other=1.0)
    pointers = scores + head * n_tokens * n_frames + (token * n_frames + frame)
    x = tl.load(pointers, mask=mask, other=float("-inf"))
    weights = tl.exp(x - peak) / total
    weights = weights / tl.maximum(tl.max(weights, 0), min_divisor)[None, :]
    centred = tl.where(is_token, weights - (tl.sum(weights, 0) / count)[None, :], 0.0)
    std = tl.sqrt(tl.sum(centred * centred, 0) / count)
    z_scores = centred / tl.maximum(std, min_divisor)[None, :]
    tl.store(pointers, z_scores, mask=mask)


@triton.jit
def _sorted(a, b) -> tuple[tl.tensor, tl.tensor]:
    return tl.minimum(a, b), tl.maximum(a, b)


@triton.jit
def _load_mirrored(row, frame, last) -> tl.tensor:
    """Load a row's scores at some frames, mirrored at both ends of the window."""
    frame = tl.abs(frame)
    frame = tl.where(frame > last, 2 * last - frame, frame)
    return tl.load(row + tl.maximum(frame, 0))


@triton.jit
def _median(row, frame, last) -> tl.tensor:
    """Return the median of seven adjacent frames, by the exchanges of `alignment.median_of_7`."""
    a, b, c = (
        _load_mirrored(row, frame - 3, last),
        _load_mirrored(row, frame - 2, last),
        _load_mirrored(row, frame - 1, last),
    )
    d, e, f = (
        _load_mirrored(row, frame, last),
        _load_mirrored(row, frame + 1, last),
        _load_mirrored(row, frame + 2, last),
    )
    g = _load_mirrored(row, frame + 3, last)
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
    z_scores, tokens, frames, means, n_heads: int, n_tokens: int, n_frames: int, block: tl.constexpr
) -> None:
    """Smooth a token's z-scores with a median over adjacent frames, and average them over heads.

    scored is `scores` after `score_kernel`; matrix (windows, n_tokens, n_frames).
    """
    row = tl.program_id(0).to(tl.int64)
    window, token = row // n_tokens, row % n_tokens
    if token < tl.load(tokens + window):
        last = tl.load(frames + window).to(tl.int32) - 1
        frame = tl.program_id(1) * block + tl.arange(0, block)
        clamped_frame = tl.minimum(frame, last)
        total = tl.zeros((block,), tl.float32)
        for head in range(n_heads):
            head_row = z_scores + ((window * n_heads + head) * n_tokens + token) * n_frames
            if last >= 3:
                total += _median(head_row, clamped_frame, last)
            else:  # too short to be mirrored at its ends
                total += tl.load(head_row + clamped_frame)
        tl.store(means + row * n_frames + frame, total / n_heads, mask=frame <= last)


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
