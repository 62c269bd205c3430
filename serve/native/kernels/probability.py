"""Compute `reference_ops.token_probability` with a Triton kernel that reads the logits once."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch

_BLOCK = 4096  # tokens per iteration
_NEVER = tl.constexpr(-1e30)  # a masked logit; infinity minus infinity would be NaN


@triton.jit(do_not_specialize=("n_ids",))
def probability_kernel(logits, text, out, n_vocab: int, n_ids: int, block: tl.constexpr) -> None:
    """Compute the softmax over the first `n_ids` logits of one row, at its token."""
    row = logits + tl.program_id(0).to(tl.int64) * n_vocab
    offset = tl.arange(0, block)
    peaks = tl.full([block], _NEVER, tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, n_ids, block):
        value = tl.load(row + start + offset, mask=start + offset < n_ids, other=_NEVER)
        new_peaks = tl.maximum(peaks, value)
        total = total * tl.exp(peaks - new_peaks) + tl.exp(value - new_peaks)
        peaks = new_peaks
    peak = tl.max(peaks, 0)
    denominator = tl.sum(total * tl.exp(peaks - peak), 0)
    logit = tl.load(row + tl.load(text + tl.program_id(0)))
    tl.store(out + tl.program_id(0), tl.exp(logit - peak) / denominator)


def token_probability(logits: torch.Tensor, text: torch.Tensor, n_ids: int) -> torch.Tensor:
    assert logits.is_contiguous() and text.is_contiguous()
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sizes = (logits.shape[1], n_ids, _BLOCK)
    launch(probability_kernel, len(logits))(logits, text, out, *sizes, num_warps=8)
    return out
