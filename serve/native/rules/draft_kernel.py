"""Compute `TokenRules.write_draft` with a Triton kernel, which reads the logits once."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import triton
import triton.language as tl

DRAFT_BLOCK = 8192  # tokens per iteration


@triton.jit(do_not_specialize=("offset",))
def draft_kernel(
    logits,
    suppress,
    rows,
    tokens,
    position,
    offset: int,
    n_vocab: int,
    n_ctx: int,
    block: tl.constexpr,
) -> None:
    logits_begin = tl.program_id(0).to(tl.int64) * n_vocab
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    next_position = tl.load(position + row) + offset
    column = tl.arange(0, block)
    best = tl.full([block], float("-inf"), tl.float32)
    likeliest = tl.zeros([block], tl.int32)  # a valid token even if all logits are NaN
    for start in range(0, n_vocab, block):
        token_id = start + column
        mask = token_id < n_vocab
        score = tl.load(logits + logits_begin + token_id, mask=mask, other=float("-inf"))
        score += tl.load(suppress + token_id, mask=mask, other=0.0)
        is_higher = score > best
        best = tl.where(is_higher, score, best)
        likeliest = tl.where(is_higher, token_id, likeliest)
    token = tl.min(tl.where(best == tl.max(best, 0), likeliest, n_vocab), 0)
    if next_position < n_ctx:
        tl.store(tokens + row * n_ctx + next_position, token.to(tl.int64))
