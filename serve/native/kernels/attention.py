"""Self-attention and embedding of what a step is fed, as Triton-language kernels.

Which row is fed at which position (`Feed`) stands in tensors that no kernel of a step writes: they
may be read before the kernel before has ended (`pdl`, see `linear`). A row's past may not, once a
step feeds it several positions.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.linear import finish


@triton.jit
def finished(
    x: tl.tensor, at: tl.tensor, stride: int, scale: tl.tensor, bias: tl.tensor, n: tl.tensor,
    parts: tl.constexpr, quantized: tl.constexpr, dtype: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Numbers of a linear layer's output, which may be unfinished sums of `parts`."""
    value = tl.load(x + at)
    if parts > 0:
        for part in tl.static_range(1, parts):
            value += tl.load(x + part * stride + at)
        factor = tl.load(scale + n) if quantized else 1.0
        value = finish(value, factor, tl.load(bias + n).to(tl.float32), quantized, True, False)
    return value.to(dtype)


@triton.jit
def _new_key_and_value(
    qkv: tl.tensor, scale: tl.tensor, bias: tl.tensor, feed: int, feeds: int, width: int,
    n: tl.tensor, parts: tl.constexpr, quantized: tl.constexpr, dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """What a feed adds to its row's cache, as the cache keeps it; n are a head's channels."""
    at = feed * 3 * width + n
    stride = feeds * 3 * width
    key = finished(qkv, at + width, stride, scale, bias, n + width, parts, quantized, dtype)
    value = finished(
        qkv, at + 2 * width, stride, scale, bias, n + 2 * width, parts, quantized, dtype
    )
    return key, value


@triton.jit(do_not_specialize=("feeds",))
def append_kernel(
    qkv: tl.tensor, scale: tl.tensor, bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    rows: tl.tensor, positions: tl.tensor, feeds: int, heads: int, n_ctx: int,
    head_dim: tl.constexpr, parts: tl.constexpr, quantized: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    """One feed and head: put its key and value where later feeds of its row will look."""
    head = tl.program_id(0)
    feed = tl.program_id(1)
    width = heads * head_dim
    n = head * head_dim + tl.arange(0, head_dim)
    place = (tl.load(rows + feed) * n_ctx + tl.load(positions + feed)).to(tl.int64) * width + n
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    key, value = _new_key_and_value(
        qkv, scale, bias, feed, feeds, width, n, parts, quantized, k_cache.dtype.element_ty
    )
    tl.store(k_cache + place, key)
    tl.store(v_cache + place, value)


@triton.jit(do_not_specialize=("feeds",))
def self_attention_kernel(
    qkv: tl.tensor, scale: tl.tensor, bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    rows: tl.tensor, positions: tl.tensor, source: tl.tensor, out: tl.tensor, feeds: int,
    heads: int, n_ctx: int, head_dim: tl.constexpr, block: tl.constexpr, parts: tl.constexpr,
    quantized: tl.constexpr, elsewhere: tl.constexpr, appends: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    """One feed and head: attend to its own key, then to its row's past in blocks.

    With `appends` it also puts its key and value into its row's cache: then no other feed may be
    of the same row. With `elsewhere`, `source` says whose cache holds each position of the past.
    """
    head = tl.program_id(0)
    feed = tl.program_id(1)
    width = heads * head_dim
    n = head * head_dim + tl.arange(0, head_dim)
    own = tl.load(rows + feed).to(tl.int64) * n_ctx  # where the row's positions begin
    position = tl.load(positions + feed).to(tl.int32)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = k_cache.dtype.element_ty
    query = finished(
        qkv, feed * 3 * width + n, feeds * 3 * width, scale, bias, n, parts, quantized, dtype
    ).to(tl.float32)
    new_k, new_v = _new_key_and_value(
        qkv, scale, bias, feed, feeds, width, n, parts, quantized, dtype
    )
    if appends:
        place = (own + position) * width + n
        tl.store(k_cache + place, new_k)
        tl.store(v_cache + place, new_v)
    peak = tl.sum(query * new_k.to(tl.float32), 0)
    total = peak * 0.0 + 1.0
    acc = new_v.to(tl.float32)
    for start in range(0, position, block):
        t = start + tl.arange(0, block)
        older = t < position
        if elsewhere:
            past = tl.load(source + own + t, mask=older, other=0).to(tl.int64) * n_ctx + t
        else:
            past = own + t
        at = past[:, None] * width + n[None, :]
        keys = tl.load(k_cache + at, mask=older[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_cache + at, mask=older[:, None], other=0.0).to(tl.float32)
        score = tl.where(older, tl.sum(keys * query[None, :], 1), float("-inf"))
        top = tl.maximum(peak, tl.max(score, 0))
        p = tl.exp(score - top)
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(p, 0)
        acc = acc * shrink + tl.sum(p[:, None] * values, 0)
        peak = top
    tl.store(out + feed * width + n, (acc / total).to(out.dtype.element_ty))


@triton.jit
def embed_kernel(
    ids: tl.tensor, rows: tl.tensor, positions: tl.tensor, tokens: tl.tensor, places: tl.tensor,
    out: tl.tensor, n_ctx: int, width: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """One feed's token, embedded, plus its position's own embedding."""
    feed = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < width
    position = tl.load(positions + feed)
    token = tl.load(ids + tl.load(rows + feed) * n_ctx + position)
    value = tl.load(tokens + token * width + at, mask=inside)
    place = tl.load(places + position * width + at, mask=inside)
    tl.store(out + feed * width + at, value + place, mask=inside)
