"""The INT8 store of cross-attention's keys and values, as a Triton-language kernel."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def quantize_kernel(
    x: tl.tensor, slots: tl.tensor, out: tl.tensor, scale: tl.tensor, stack: int, heads: int,
    time: int, head_dim: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one layer's keys or values of one window -> int8 and a scale per channel.

    x is (windows, time, groups * heads, head_dim), out (groups, stack, heads, time, head_dim).
    """
    column = tl.program_id(0)  # group * heads + head
    window = tl.program_id(1)
    wide = tl.num_programs(0) * head_dim
    slot = tl.load(slots + window)
    d = tl.arange(0, head_dim)
    source = x + window.to(tl.int64) * time * wide + column * head_dim + d[None, :]
    largest = tl.zeros([block, head_dim], dtype=tl.float32)
    for start in range(0, time, block):
        t = start + tl.arange(0, block)[:, None]
        value = tl.load(source + t.to(tl.int64) * wide, mask=t < time, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    step = tl.max(largest, 0) / 127.0
    inverse = 1.0 / tl.maximum(step, 1e-30)  # a channel of zeros stays zeros
    place = (column // heads * stack + slot) * heads + column % heads
    tl.store(scale + place * head_dim + d, step)
    target = out + place.to(tl.int64) * time * head_dim + d[None, :]
    for start in range(0, time, block):
        t = start + tl.arange(0, block)[:, None]
        value = tl.load(source + t.to(tl.int64) * wide, mask=t < time, other=0.0).to(tl.float32)
        scaled = value * inverse[None, :]
        rounded = tl.where(scaled >= 0.0, tl.floor(scaled + 0.5), tl.ceil(scaled - 0.5))
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        tl.store(target + t * head_dim, rounded.to(tl.int8), mask=t < time)
