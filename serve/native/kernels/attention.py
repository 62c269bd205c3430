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


@triton.jit
def _begin(
    qkv: tl.tensor, scale: tl.tensor, bias: tl.tensor, feed: int, feeds: int, width: int,
    n: tl.tensor, place: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, parts: tl.constexpr,
    quantized: tl.constexpr, appends: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(query, peak, total, mixed) of a feed that has attended to its own key."""
    dtype: tl.constexpr = k_cache.dtype.element_ty
    query = finished(
        qkv, feed * 3 * width + n, feeds * 3 * width, scale, bias, n, parts, quantized, dtype
    ).to(tl.float32)
    key, value = _new_key_and_value(
        qkv, scale, bias, feed, feeds, width, n, parts, quantized, dtype
    )
    if appends:
        tl.store(k_cache + place, key)
        tl.store(v_cache + place, value)
    peak = tl.sum(query * key.to(tl.float32), 0)
    return query, peak, peak * 0.0 + 1.0, value.to(tl.float32)


@triton.jit
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, older: tl.tensor, peak: tl.tensor,
    total: tl.tensor, acc: tl.tensor, exists: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """A feed attends to those keys of a block that are older than it; others change no bit."""
    if exists:
        score = tl.where(older, tl.sum(keys * query[None, :], 1), float("-inf"))
        top = tl.maximum(peak, tl.max(score, 0))
        p = tl.exp(score - top)
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(p, 0)
        acc = acc * shrink + tl.sum(p[:, None] * values, 0)
        peak = top
    return peak, total, acc


@triton.jit(do_not_specialize=("feeds",))
def self_attention_kernel(
    qkv: tl.tensor, scale: tl.tensor, bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    rows: tl.tensor, positions: tl.tensor, source: tl.tensor, out: tl.tensor, feeds: int,
    heads: int, n_ctx: int, head_dim: tl.constexpr, block: tl.constexpr, each: tl.constexpr,
    parts: tl.constexpr, quantized: tl.constexpr, elsewhere: tl.constexpr, appends: tl.constexpr,
    pdl: tl.constexpr,
) -> None:  # fmt: skip
    """`each` feeds of a row, up to four: attend to their own keys, then to its past in blocks.

    They share what is read of the past; what is computed of a feed that does not exist is left out.
    With `appends` they also put their keys and values into their row's cache: then no others may
    be of the same row. With `elsewhere`, `source` says whose cache holds each position of the past.
    """
    head = tl.program_id(0)
    a = tl.program_id(1) * each
    b, c, d = a + (each > 1), a + 2 * (each > 2), a + 3 * (each > 3)  # feed a again: there is none
    width = heads * head_dim
    n = head * head_dim + tl.arange(0, head_dim)
    own = tl.load(rows + a).to(tl.int64) * n_ctx  # where the row's positions begin
    at_a, at_b = tl.load(positions + a).to(tl.int32), tl.load(positions + b).to(tl.int32)
    at_c, at_d = tl.load(positions + c).to(tl.int32), tl.load(positions + d).to(tl.int32)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    place = own * width + n
    q_a, peak_a, total_a, acc_a = _begin(
        qkv, scale, bias, a, feeds, width, n, place + at_a * width, k_cache, v_cache, parts,
        quantized, appends,
    )  # fmt: skip
    q_b, peak_b, total_b, acc_b = _begin(
        qkv, scale, bias, b, feeds, width, n, place + at_b * width, k_cache, v_cache, parts,
        quantized, appends and each > 1,
    )  # fmt: skip
    q_c, peak_c, total_c, acc_c = _begin(
        qkv, scale, bias, c, feeds, width, n, place + at_c * width, k_cache, v_cache, parts,
        quantized, appends and each > 2,
    )  # fmt: skip
    q_d, peak_d, total_d, acc_d = _begin(
        qkv, scale, bias, d, feeds, width, n, place + at_d * width, k_cache, v_cache, parts,
        quantized, appends and each > 3,
    )  # fmt: skip
    if appends and each > 1:
        tl.debug_barrier()  # what a feed has put there, those behind it read
    end = tl.maximum(tl.maximum(at_a, at_b), tl.maximum(at_c, at_d))
    for start in range(0, end, block):
        t = start + tl.arange(0, block)
        older = t < end
        if elsewhere:
            past = tl.load(source + own + t, mask=older, other=0).to(tl.int64) * n_ctx + t
        else:
            past = own + t
        at = past[:, None] * width + n[None, :]
        k = tl.load(k_cache + at, mask=older[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_cache + at, mask=older[:, None], other=0.0).to(tl.float32)
        peak_a, total_a, acc_a = _attend(q_a, k, v, t < at_a, peak_a, total_a, acc_a, True)
        peak_b, total_b, acc_b = _attend(q_b, k, v, t < at_b, peak_b, total_b, acc_b, each > 1)
        peak_c, total_c, acc_c = _attend(q_c, k, v, t < at_c, peak_c, total_c, acc_c, each > 2)
        peak_d, total_d, acc_d = _attend(q_d, k, v, t < at_d, peak_d, total_d, acc_d, each > 3)
    dtype: tl.constexpr = out.dtype.element_ty
    out += n
    tl.store(out + a * width, (acc_a / total_a).to(dtype))
    tl.store(out + b * width, (acc_b / total_b).to(dtype), mask=each > 1)
    tl.store(out + c * width, (acc_c / total_c).to(dtype), mask=each > 2)
    tl.store(out + d * width, (acc_d / total_d).to(dtype), mask=each > 3)


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
