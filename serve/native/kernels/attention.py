"""Compute the self-attention and the embeddings of a step's tokens with Triton-language kernels.

No kernel of a step writes the tensors with the tokens' rows and positions (`StepBatch`). A
kernel may therefore read them before the previous kernel has ended (`pdl`, see `linear`). It may
not read a row's past if the step computes several positions of the row.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.linear import Sums, finish


@triton.jit
def _load_qkv(
    qkv: Sums,
    which: tl.constexpr,
    token: int,
    n_tokens: int,
    width: int,
    n,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Load and finish a token's query (0), key (1) or value (2); n are a head's channels."""
    at = token * 3 * width + n + which * width
    stride = n_tokens * 3 * width
    n += which * width
    value = tl.load(qkv.numbers + at)
    if parts > 0:
        for part in tl.static_range(1, parts):
            value += tl.load(qkv.numbers + part * stride + at)
        factor = tl.load(qkv.scale + n) if quantized else 1.0
        value = finish(value, factor, tl.load(qkv.bias + n).to(tl.float32), quantized, True, False)
    return value.to(dtype)


@triton.jit(do_not_specialize=("n_tokens",))
def append_kernel(
    qkv: Sums,
    k_cache,
    v_cache,
    rows,
    positions,
    n_tokens: int,
    heads: int,
    n_ctx: int,
    head_dim: tl.constexpr,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Write the key and value of one token and head to the cache."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    width = heads * head_dim
    n = head * head_dim + tl.arange(0, head_dim)
    place = (tl.load(rows + token) * n_ctx + tl.load(positions + token)).to(tl.int64) * width + n
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = k_cache.dtype.element_ty
    key = _load_qkv(qkv, 1, token, n_tokens, width, n, parts, quantized, dtype)
    value = _load_qkv(qkv, 2, token, n_tokens, width, n, parts, quantized, dtype)
    tl.store(k_cache + place, key)
    tl.store(v_cache + place, value)


@triton.jit
def _begin(
    qkv: Sums,
    token: int,
    n_tokens: int,
    width: int,
    n,
    at,
    k_cache,
    v_cache,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    appends: tl.constexpr,
) -> tl.tuple:
    """Let a token attend to its own key; return its state (query, peak, total, mixed)."""
    dtype: tl.constexpr = k_cache.dtype.element_ty
    query = _load_qkv(qkv, 0, token, n_tokens, width, n, parts, quantized, dtype).to(tl.float32)
    key = _load_qkv(qkv, 1, token, n_tokens, width, n, parts, quantized, dtype)
    value = _load_qkv(qkv, 2, token, n_tokens, width, n, parts, quantized, dtype)
    if appends:
        tl.store(k_cache + at, key)
        tl.store(v_cache + at, value)
    peak = tl.sum(query * key.to(tl.float32), 0)
    return query, peak, peak * 0.0 + 1.0, value.to(tl.float32)


@triton.jit
def _past(past: tl.tuple, start: int, block: tl.constexpr, elsewhere: tl.constexpr) -> tl.tuple:
    """Load the keys and values of a block of a row's past."""
    k_cache, v_cache, source, own, end, n_ctx, width, n = past
    t = start + tl.arange(0, block)
    older = t < end
    if elsewhere:
        line = tl.load(source + own + t, mask=older, other=0).to(tl.int64) * n_ctx + t
    else:
        line = own + t
    at = line[:, None] * width + n[None, :]
    keys = tl.load(k_cache + at, mask=older[:, None], other=0.0)
    return keys, tl.load(v_cache + at, mask=older[:, None], other=0.0)


@triton.jit
def _attend(begun: tl.tuple, keys, values, older) -> tl.tuple:
    """Let a token (see `_begin`) attend to the older keys of a block; others change no bit."""
    query, peak, total, acc = begun
    score = tl.where(older, tl.sum(keys * query[None, :], 1), float("-inf"))
    top = tl.maximum(peak, tl.max(score, 0))
    p = tl.exp(score - top)
    shrink = tl.exp(peak - top)
    total = total * shrink + tl.sum(p, 0)
    acc = acc * shrink + tl.sum(p[:, None] * values, 0)
    return query, top, total, acc


@triton.jit
def _attend_to_past(
    begun: tl.tuple,
    past: tl.tuple,
    first_block: tl.tuple,
    places: tl.tuple,
    block: tl.constexpr,
    each: tl.constexpr,
    elsewhere: tl.constexpr,
    ahead: tl.constexpr,
) -> tl.tuple:
    """Let tokens (see `_begin`) attend to their past.

    With `ahead` the caller passes the first block, and each next block is prefetched.
    """
    if ahead:
        keys, values = first_block
    for start in range(0, past[4], block):
        if ahead:
            next_keys, next_values = _past(past, start + block, block, elsewhere)
        else:
            keys, values = _past(past, start, block, elsewhere)
        t = start + tl.arange(0, block)
        wide_keys, wide_values = keys.to(tl.float32), values.to(tl.float32)
        attended = ()
        for i in tl.static_range(each):
            attended = attended + (_attend(begun[i], wide_keys, wide_values, t < places[i]),)
        begun = attended
        if ahead:
            keys, values = next_keys, next_values
    return begun


@triton.jit(do_not_specialize=("n_tokens",))
def self_attention_kernel(
    qkv: Sums,
    k_cache,
    v_cache,
    rows,
    positions,
    source,
    out,
    n_tokens: int,
    heads: int,
    n_ctx: int,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    each: tl.constexpr,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    elsewhere: tl.constexpr,
    appends: tl.constexpr,
    ahead: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Let `each` tokens of a row attend to their own keys, and to the row's past in blocks.

    The tokens share each read of the past. With `appends` the kernel also writes their keys and
    values to the cache; no other program may then have tokens of the same row. With `elsewhere`,
    `source` names the row with the cache of each position of the past. With `ahead` blocks of the
    past are prefetched, the first before the previous kernel ends, so earlier steps must have
    written all of it.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * each
    width = heads * head_dim
    n = head * head_dim + tl.arange(0, head_dim)
    own = tl.load(rows + first).to(tl.int64) * n_ctx  # where the row's positions begin
    places = ()
    for i in tl.static_range(each):
        places = places + (tl.load(positions + (first + i)).to(tl.int32),)
    end = places[0]
    for i in tl.static_range(1, each):
        end = tl.maximum(end, places[i])
    past = (k_cache, v_cache, source, own, end, n_ctx, width, n)
    first_block = ()
    if ahead:
        first_block = _past(past, 0, block, elsewhere)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    place = own * width + n
    begun = ()
    for i in tl.static_range(each):
        target = place + places[i] * width
        new = _begin(
            qkv, first + i, n_tokens, width, n, target, k_cache, v_cache, parts, quantized, appends
        )
        begun = begun + (new,)
    if appends and each > 1:
        tl.debug_barrier()  # later tokens read the keys and values that earlier ones have written
    begun = _attend_to_past(begun, past, first_block, places, block, each, elsewhere, ahead)
    for i in tl.static_range(each):
        at = out + n + (first + i) * width
        tl.store(at, (begun[i][3] / begun[i][2]).to(out.dtype.element_ty))


@triton.jit
def embed_kernel(
    ids, rows, positions, tokens, places, out, n_ctx: int, width: tl.constexpr, block: tl.constexpr
) -> None:
    """Add the embeddings of one token and its position."""
    index = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < width
    position = tl.load(positions + index)
    token = tl.load(ids + tl.load(rows + index) * n_ctx + position)
    value = tl.load(tokens + token * width + at, mask=inside)
    place = tl.load(places + position * width + at, mask=inside)
    tl.store(out + index * width + at, value + place, mask=inside)
