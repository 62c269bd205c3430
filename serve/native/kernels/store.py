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
    channels: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    """Quantize `channels` channels of one window's keys or values; each channel gets a scale.

    x is (windows, time, groups * heads * head_dim), out (groups, stack, heads, time, head_dim). A
    group is the keys or the values of one layer; `stack` is the number of slots.
    Memory bandwidth is the limit, so a program reads its channels once and keeps them in registers.
    """
    d = tl.program_id(0) * channels + tl.arange(0, channels)
    head = tl.program_id(1)  # counted over all groups
    window = tl.program_id(2)
    width = tl.num_programs(1) * head_dim
    slot = tl.load(slots + window)
    t = tl.arange(0, block)[:, None]
    source = x + window.to(tl.int64) * time * width + head * head_dim + d[None, :]
    values = ()
    for i in tl.static_range(blocks):
        positions = i * block + t
        values = values + (tl.load(source + positions * width, mask=positions < time, other=0.0),)
    largest = tl.abs(values[0])
    for i in tl.static_range(1, blocks):
        largest = tl.maximum(largest, tl.abs(values[i]))
    step = tl.max(largest, 0).to(tl.float32) / 127.0
    inverse = 1.0 / tl.maximum(step, 1e-30)  # a channel of zeros stays zero
    scale_row = (head // heads * stack + slot) * heads + head % heads
    tl.store(scale + scale_row * head_dim + d, step)
    target = out + scale_row.to(tl.int64) * time * head_dim + d[None, :]
    for i in tl.static_range(blocks):
        positions = i * block + t
        # The lowest bits of the sum are the product rounded to the nearest integer, ties to even.
        rounded = tl.math.fma(values[i].to(tl.float32), inverse[None, :], _ROUNDING)
        rounded = rounded.to(tl.int32, bitcast=True).to(tl.int8)
        tl.store(target + positions * head_dim, rounded, mask=positions < time)
