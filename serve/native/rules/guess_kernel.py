"""Compute `TokenRules.guess` with a Triton kernel: one program per row reads its logits once."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import RowState

_BLOCK = 8192  # tokens per iteration


@triton.jit(do_not_specialize=("ahead",))
def _guess_kernel(
    logits,
    suppress,
    rows,
    tokens,
    position,
    ahead: int,
    n_vocab: int,
    n_ctx: int,
    block: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64) * n_vocab
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    place = tl.load(position + row) + ahead
    offset = tl.arange(0, block)
    best = tl.full([block], float("-inf"), tl.float32)
    likeliest = tl.zeros([block], tl.int32)  # a valid token even if all logits are NaN
    for start in range(0, n_vocab, block):
        id = start + offset
        there = id < n_vocab
        score = tl.load(logits + line + id, mask=there, other=float("-inf"))
        score += tl.load(suppress + id, mask=there, other=0.0)
        better = score > best
        best = tl.where(better, score, best)
        likeliest = tl.where(better, id, likeliest)
    token = tl.min(tl.where(best == tl.max(best, 0), likeliest, n_vocab), 0)
    if place < n_ctx:
        tl.store(tokens + row * n_ctx + place, token.to(tl.int64))


class TritonDraftSampler:
    """A sampler of draft tokens that applies a checkpoint's suppress list."""

    def __init__(self, rules: TokenRules) -> None:
        self._suppress = rules.suppress

    def guess(self, state: RowState, rows: torch.Tensor, logits: torch.Tensor, ahead: int) -> None:
        assert logits.is_contiguous() and rows.is_contiguous()
        fed, sizes = (state.tokens, state.position), (logits.shape[1], state.tokens.shape[1])
        launch(_guess_kernel, len(rows))(
            logits, self._suppress, rows, *fed, ahead, *sizes, _BLOCK, num_warps=16
        )
