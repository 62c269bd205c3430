"""Compute the self-attention and the embeddings of a step's tokens with Triton-language kernels.

No kernel of a step writes the tensors with the tokens' rows and positions (`StepBatch`). A kernel
may therefore read them before the previous kernel ends (`pdl`, see `linear`). It may read a row's
earlier keys and values that early only if the step computes one position per row.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.linear import Sums, apply_epilogue


@triton.jit
def _load_qkv(
    qkv: Sums,
    qkv_index: tl.constexpr,
    token: int,
    n_tokens: int,
    width: int,
    n,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Load a token's query, key or value of one head, and add up its partial sums.

    `qkv_index` is 0 for the query, 1 for the key and 2 for the value; `n` are the head's channels.
    """
    offsets = token * 3 * width + n + qkv_index * width
    stride = n_tokens * 3 * width
    n += qkv_index * width
    value = tl.load(qkv.data + offsets)
    if parts > 0:
        for part in tl.static_range(1, parts):
            value += tl.load(qkv.data + part * stride + offsets)
        scale = tl.load(qkv.scale + n) if quantized else 1.0
        bias = tl.load(qkv.bias + n).to(tl.float32)
        value = apply_epilogue(value, scale, bias, quantized, True, False)
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
    offsets = (tl.load(rows + token) * n_ctx + tl.load(positions + token)).to(tl.int64) * width + n
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = k_cache.dtype.element_ty
    key = _load_qkv(qkv, 1, token, n_tokens, width, n, parts, quantized, dtype)
    value = _load_qkv(qkv, 2, token, n_tokens, width, n, parts, quantized, dtype)
    tl.store(k_cache + offsets, key)
    tl.store(v_cache + offsets, value)


@triton.jit
def _attend_to_self(
    qkv: Sums,
    token: int,
    n_tokens: int,
    width: int,
    n,
    offsets,
    k_cache,
    v_cache,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    append: tl.constexpr,
) -> tl.tuple:
    """Start a token's attention with its own key; return its state.

    The state is (query, highest score, sum of softmax numerators, weighted sum of values).
    """
    dtype: tl.constexpr = k_cache.dtype.element_ty
    query = _load_qkv(qkv, 0, token, n_tokens, width, n, parts, quantized, dtype).to(tl.float32)
    key = _load_qkv(qkv, 1, token, n_tokens, width, n, parts, quantized, dtype)
    value = _load_qkv(qkv, 2, token, n_tokens, width, n, parts, quantized, dtype)
    if append:
        tl.store(k_cache + offsets, key)
        tl.store(v_cache + offsets, value)
    peak = tl.sum(query * key.to(tl.float32), 0)
    return query, peak, peak * 0.0 + 1.0, value.to(tl.float32)


@triton.jit
def _load_past(
    past: tl.tuple, start: int, block: tl.constexpr, has_source: tl.constexpr
) -> tl.tuple:
    """Load the keys and values of a block of a row's past, with zeros from its end on."""
    k_cache, v_cache, source, row_begin, end, n_ctx, width, n = past
    positions = start + tl.arange(0, block)
    mask = positions < end
    if has_source:
        entries = tl.load(source + row_begin + positions, mask=mask, other=0).to(tl.int64)
        entries = entries * n_ctx + positions
    else:
        entries = row_begin + positions
    offsets = entries[:, None] * width + n[None, :]
    keys = tl.load(k_cache + offsets, mask=mask[:, None], other=0.0)
    return keys, tl.load(v_cache + offsets, mask=mask[:, None], other=0.0)


@triton.jit
def _attend(state: tl.tuple, keys, values, mask) -> tl.tuple:
    """Add the block's keys in `mask` to a token's state (see `_attend_to_self`)."""
    query, peak, total, acc = state
    score = tl.where(mask, tl.sum(keys * query[None, :], 1), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 0))
    weights = tl.exp(score - new_peak)
    rescale = tl.exp(peak - new_peak)
    total = total * rescale + tl.sum(weights, 0)
    acc = acc * rescale + tl.sum(weights[:, None] * values, 0)
    return query, new_peak, total, acc


@triton.jit
def _attend_to_past(
    states: tl.tuple,
    past: tl.tuple,
    first_block: tl.tuple,
    positions: tl.tuple,
    block: tl.constexpr,
    n_tokens: tl.constexpr,
    has_source: tl.constexpr,
    prefetch: tl.constexpr,
) -> tl.tuple:
    """Add the past of `n_tokens` tokens of a row to their states (see `_attend_to_self`).

    With `prefetch` the caller passes the first block, and the loop loads each block one iteration
    early.
    """
    if prefetch:
        keys, values = first_block
    for start in range(0, past[4], block):
        if prefetch:
            next_keys, next_values = _load_past(past, start + block, block, has_source)
        else:
            keys, values = _load_past(past, start, block, has_source)
        past_positions = start + tl.arange(0, block)
        keys_fp32, values_fp32 = keys.to(tl.float32), values.to(tl.float32)
        new_states = ()
        for i in tl.static_range(n_tokens):
            new_states = new_states + (
                _attend(states[i], keys_fp32, values_fp32, past_positions < positions[i]),
            )
        states = new_states
        if prefetch:
            keys, values = next_keys, next_values
    return states


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
    tokens_per_program: tl.constexpr,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    has_source: tl.constexpr,
    append: tl.constexpr,
    prefetch: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Compute the self-attention of `tokens_per_program` tokens of a row, for one head.

    The tokens share each read of the row's past. With `append` the kernel also writes their keys
    and values to the cache; no other program may then have tokens of the same row. With
    `has_source`, `source` names the row that cached each position of the past. With `prefetch` the
    first block of the past is loaded before the previous kernel ends, so earlier steps must have
    written the whole past.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) * tokens_per_program
    width = heads * head_dim
    n = head * head_dim + tl.arange(0, head_dim)
    row_begin = tl.load(rows + first).to(tl.int64) * n_ctx  # where the row's positions begin
    token_positions = ()
    for i in tl.static_range(tokens_per_program):
        token_positions = token_positions + (tl.load(positions + (first + i)).to(tl.int32),)
    past_end = token_positions[0]
    for i in tl.static_range(1, tokens_per_program):
        past_end = tl.maximum(past_end, token_positions[i])
    past = (k_cache, v_cache, source, row_begin, past_end, n_ctx, width, n)
    first_block = ()
    if prefetch:
        first_block = _load_past(past, 0, block, has_source)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row_offsets = row_begin * width + n
    states = ()
    for i in tl.static_range(tokens_per_program):
        offsets = row_offsets + token_positions[i] * width
        state = _attend_to_self(
            qkv, first + i, n_tokens, width, n, offsets, k_cache, v_cache, parts, quantized, append
        )
        states = states + (state,)
    if append and tokens_per_program > 1:
        tl.debug_barrier()  # later tokens read the keys and values that earlier ones have written
    states = _attend_to_past(
        states, past, first_block, token_positions, block, tokens_per_program, has_source, prefetch
    )
    for i in tl.static_range(tokens_per_program):
        pointers = out + n + (first + i) * width
        tl.store(pointers, (states[i][3] / states[i][2]).to(out.dtype.element_ty))


@triton.jit
def embed_kernel(
    ids,
    rows,
    positions,
    token_embedding,
    position_embedding,
    out,
    n_ctx: int,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add the embeddings of one token and its position."""
    index = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < width
    position = tl.load(positions + index)
    token = tl.load(ids + tl.load(rows + index) * n_ctx + position)
    token_value = tl.load(token_embedding + token * width + column, mask=mask)
    position_value = tl.load(position_embedding + position * width + column, mask=mask)
    tl.store(out + index * width + column, token_value + position_value, mask=mask)
