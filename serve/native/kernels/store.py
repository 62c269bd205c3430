"""Quantize cross-attention keys and values to INT8 with a Triton-language kernel."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

import triton
import triton.language as tl

_ROUNDING = tl.constexpr(1.5 * 2**23)  # float32 numbers of this size are integers


@triton.jit
def quantize_kernel(
    x,
    slots,
    out,
    scale,
    stack: int,
    heads: int,
    time: int,
    head_dim: tl.constexpr,
    share: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    """Quantize `share` channels of a window's keys or values of one layer, with a scale each.

    x is (windows, time, groups * heads * head_dim), out (groups, stack, heads, time, head_dim).
    Memory bandwidth is the limit, so a program keeps whole channels in registers and reads once.
    """
    d = tl.program_id(0) * share + tl.arange(0, share)
    head = tl.program_id(1)  # counted over all groups
    window = tl.program_id(2)
    width = tl.num_programs(1) * head_dim
    slot = tl.load(slots + window)
    t = tl.arange(0, block)[:, None]
    source = x + window.to(tl.int64) * time * width + head * head_dim + d[None, :]
    kept = ()
    for i in tl.static_range(blocks):
        at = i * block + t
        kept = kept + (tl.load(source + at * width, mask=at < time, other=0.0),)
    largest = tl.abs(kept[0])
    for i in tl.static_range(1, blocks):
        largest = tl.maximum(largest, tl.abs(kept[i]))
    step = tl.max(largest, 0).to(tl.float32) / 127.0
    inverse = 1.0 / tl.maximum(step, 1e-30)  # a channel of zeros stays zero
    place = (head // heads * stack + slot) * heads + head % heads
    tl.store(scale + place * head_dim + d, step)
    target = out + place.to(tl.int64) * time * head_dim + d[None, :]
    for i in tl.static_range(blocks):
        at = i * block + t
        # The lowest bits of the sum are the product rounded to the nearest integer, ties to even.
        rounded = tl.math.fma(kept[i].to(tl.float32), inverse[None, :], _ROUNDING)
        rounded = rounded.to(tl.int32, bitcast=True).to(tl.int8)
        tl.store(target + at * head_dim, rounded, mask=at < time)
