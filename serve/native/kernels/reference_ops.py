"""Reference implementation, in plain torch, of the operations of a Whisper layer.

Each faster kernel has the signature of the function here and is tested against it. Nothing here
waits for the device, so a decoder step of these operations can be captured in a CUDA graph.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from serve.native.kernels.step_batch import SlotGroups, StepBatch

LAYER_NORM_EPS = 1e-5
FP8_MAX = 448.0  # the largest number of e4m3


@dataclasses.dataclass(frozen=True)
class Norm:
    """Layer norm parameters, float32 (d,)."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A linear layer: weight (out, in) and bias (out,) or None, in the compute dtype.

    With `scale`, float32 (out,), the weight is int8 and each row represents weight * scale. Some
    implementations keep copies: `half_weight` is the weight in float16 without the scale, and
    `packed_weight` is the weight packed for `skinny_gemm`. `step`, float32 (), divides FP8 outputs.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None
    half_weight: torch.Tensor | None = None
    packed_weight: torch.Tensor | None = None
    step: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Scaled:
    """FP8 (e4m3) rows: values (..., in); each row represents values * scale, float32 (rows,)."""

    values: torch.Tensor
    scale: torch.Tensor


def scaled(x: torch.Tensor) -> Scaled:
    """Quantize rows to FP8, each scaled by its largest number."""
    value = x.float()
    scale = value.abs().amax(dim=-1).clamp_min(1e-12) / FP8_MAX
    return Scaled((value / scale[..., None]).to(torch.float8_e4m3fn), scale.flatten())


def prepare(matrix: Matrix, norm: Norm | None = None) -> Matrix:
    """Prepare a matrix for the encoder's products; the reference keeps it.

    Args:
        matrix: a linear layer.
        norm: the layer norm before the matrix, if GELU follows the matrix.
    """
    return matrix


def store(matrix: Matrix) -> Matrix:
    """Lay out a matrix for the decoder's products; transpose it if it has more outputs than inputs.

    With few rows, MKL multiplies such a transposed matrix in half the time.
    """
    n_out, n_in = matrix.weight.shape
    if matrix.weight.is_cuda or n_out <= n_in:
        return matrix
    return dataclasses.replace(matrix, weight=matrix.weight.T.contiguous().T)


def stem(
    features: torch.Tensor, conv1: Matrix, conv2: Matrix, positions: torch.Tensor
) -> torch.Tensor:
    """Apply two convolutions, each followed by GELU, and add the position embeddings.

    Args:
        features: float32 (batch, n_mels, time).
        conv1, conv2: kernel size 3, the second with stride 2; weights (out, 3 * in), taps first.
        positions: (time / 2, d).

    Returns:
        (batch, time / 2, d).
    """
    x = features.to(conv1.weight.device, conv1.weight.dtype)
    for stride, conv in ((1, conv1), (2, conv2)):
        weight = conv.weight.view(len(conv.weight), 3, -1).transpose(1, 2)
        x = F.gelu(F.conv1d(x, weight, conv.bias, stride=stride, padding=1))
    return x.transpose(1, 2).contiguous() + positions


def linear_gelu(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Apply a linear layer and exact (erf) GELU: (..., in) -> (..., out)."""
    return F.gelu(linear(x, matrix))


def add_linear_norm(
    x: torch.Tensor, y: torch.Tensor, matrix: Matrix, shift: torch.Tensor, params: Norm
) -> torch.Tensor:
    """Add linear(y) to x in place, then apply layer norm to x + shift.

    The residual stream x omits the biases of the layers added so far, so that each addition rounds
    x only once. `shift` is the sum of these biases.

    Args:
        x: the residual stream (..., d).
        y: (..., in), or the result of `linear_gelu` of the same implementation.
        matrix: in -> d, without a bias.
        shift: float32 (d,).
        params: the layer norm's weights.

    Returns:
        The normalized x (..., d), in the form that the linear layers of this implementation read.
    """
    x += linear(y, matrix)
    return norm(x + shift, params).to(x.dtype)


add_linear_last_norm = add_linear_norm
"""`add_linear_norm` at the end of the encoder; its result is always a tensor like `x`."""


def linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Apply a linear layer: (..., in) -> (..., out)."""
    weight = matrix.weight
    if matrix.scale is not None:
        weight = (weight * matrix.scale[:, None]).to(x.dtype)
    return F.linear(x, weight, matrix.bias)


def norm(x: torch.Tensor, params: Norm) -> torch.Tensor:
    """Normalise the last dimension in float32; return the dtype of `x`."""
    y = F.layer_norm(x.float(), params.weight.shape, params.weight, params.bias, LAYER_NORM_EPS)
    return y.to(x.dtype)


def norm_linear(x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
    """Apply layer norm and a linear layer: (..., in) -> (..., out)."""
    return linear(norm(x, params), matrix)


def norm_linear_gelu(x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
    """Apply layer norm, a linear layer and exact (erf) GELU: (..., in) -> (..., out)."""
    return F.gelu(norm_linear(x, params, matrix))


def linear_residual(x: torch.Tensor, matrix: Matrix, residual: torch.Tensor) -> torch.Tensor:
    """Add a linear layer to the residual stream: (..., in) -> (..., out)."""
    return residual + linear(x, matrix)


def finish(x: torch.Tensor) -> torch.Tensor:
    """Finish a linear layer's output; the reference returns finished outputs."""
    return x


def logits(
    x: torch.Tensor, params: Norm, matrix: Matrix, logit_indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply layer norm and the vocabulary projection.

    Args:
        x: (n, in).
        params: the layer norm's weights.
        matrix: in -> vocabulary.
        logit_indices: int64 (m,), the rows of x that need logits; None: all.

    Returns:
        float32 (m, vocabulary).
    """
    return norm_linear(x if logit_indices is None else x[logit_indices], params, matrix).float()


def embed(
    batch: StepBatch, token_embedding: torch.Tensor, position_embedding: torch.Tensor
) -> torch.Tensor:
    """Add the embeddings of each token and its position.

    Args:
        batch: n tokens.
        token_embedding: (n_vocab, d).
        position_embedding: (n_text_ctx, d).

    Returns:
        (n, d).
    """
    tokens = token_embedding[batch.ids[batch.rows, batch.positions]]
    return tokens + position_embedding[batch.positions]


def encoder_attention(qkv: torch.Tensor, n_head: int) -> torch.Tensor:
    """Compute full (non-causal) self-attention; the query is already scaled.

    Args:
        qkv: (batch, time, 3 * d), query, key and value concatenated.
        n_head: the number of heads, of d / n_head dimensions each.

    Returns:
        (batch, time, d).
    """
    batch, time, _ = qkv.shape
    q, k, v = qkv.view(batch, time, 3, n_head, -1).permute(2, 0, 3, 1, 4)
    with _cudnn_first() if qkv.is_cuda else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out.transpose(1, 2).reshape(batch, time, -1)


def _cudnn_first() -> contextlib.AbstractContextManager[None]:
    """Prefer cuDNN's attention; torch's own order tries FlashAttention first."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masked: torch.Tensor | None = None,
    log_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of few queries, which are already scaled.

    Args:
        query: (batch, heads, queries, head_dim).
        k, v: (batch, heads, time, head_dim).
        masked: bool (batch, 1, queries, time), the masked keys; None: none.
        log_weights: float32 (heads, time), added to the scores.

    Returns:
        (batch, heads, queries, head_dim).
    """
    score = (query @ k.transpose(-1, -2)).float()
    if masked is not None:
        score.masked_fill_(masked, -math.inf)
    if log_weights is not None:
        score += log_weights[:, None]
    return score.softmax(-1).to(v.dtype) @ v


def attend_audio(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_weights: torch.Tensor | None
) -> torch.Tensor:
    """Compute `attend` without a mask."""
    return attend(query, k, v, None, log_weights)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def self_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: StepBatch,
    attend: Attend = attend,
) -> torch.Tensor:
    """Compute causal self-attention of one decoder step.

    The function writes each token's key and value to the cache at the token's row and position.
    Each token then attends to its row's positions, from 0 to its own.

    Args:
        qkv: (n, 3 * d), the query already scaled.
        k_cache, v_cache: (rows, n_text_ctx, heads, head_dim), updated in place.
        batch: n tokens.
        attend: the attention of a run of rows.

    Returns:
        (n, d).
    """
    heads, head_dim = k_cache.shape[2:]
    q, k, v = qkv.view(len(batch.rows), 3, -1).unbind(1)
    keys, values = k_cache.view(-1, k.shape[-1]), v_cache.view(-1, v.shape[-1])
    keys.index_copy_(0, batch.token_entries, k)
    values.index_copy_(0, batch.token_entries, v)
    outputs = []
    for run in batch.runs:
        first, rows, per_row = run
        tokens = slice(first, first + rows * per_row)
        k, v = (batch.past_of(run, cache).transpose(1, 2) for cache in (k_cache, v_cache))
        query = q[tokens].view(rows, per_row, heads, head_dim).transpose(1, 2)
        masked = ~batch.past_mask[tokens].view(rows, 1, per_row, batch.past)
        out = attend(query, k, v, masked)
        outputs.append(out.transpose(1, 2).reshape(rows * per_row, heads * head_dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclasses.dataclass(frozen=True)
class CrossKV:
    """The cross-attention cache of one layer, (slots, heads, n_audio_ctx, head_dim).

    With scales, float32 (slots, heads, head_dim), it is int8 and represents number * scale.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    log_weights: torch.Tensor | None = None  # float32 (heads, n_audio_ctx), added to the scores
    # By slot, the cache with fewer keys that replaces this one; each such cache covers all slots.
    short: "Sequence[CrossKV | None] | None" = None


def store_cross(
    x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Write projected keys and values of windows to their slots.

    Args:
        x: (windows, n_audio_ctx, layers * 2 * d), keys and values of some layers concatenated.
        slots: int64 (windows,).
        cache: (layers, 2, slots, heads, n_audio_ctx, head_dim), written at `slots`.
        scale: float32 (layers, 2, slots, heads, head_dim), written at `slots`. If given, each
            channel of a slot's head is scaled by its largest number and rounded half to even.
    """
    layers, _, _, heads, time, head_dim = cache.shape
    value = x.view(len(x), time, layers, 2, heads, head_dim).permute(2, 3, 0, 4, 1, 5)
    if scale is not None:
        step = value.float().abs().amax(dim=-2) / 127.0
        scale.index_copy_(2, slots, step)
        scaled = value.float() * (1.0 / step.clamp_min(1e-30))[..., None, :]
        value = scaled.round().to(torch.int8)
    cache.index_copy_(2, slots, value)


def cross_attention(
    q: torch.Tensor, cross: CrossKV, groups: SlotGroups, attend: Attend = attend_audio
) -> torch.Tensor:
    """Compute cross-attention of one decoder step; tokens of a slot share each read of the keys.

    Args:
        q: (n, d), already scaled.
        cross: the cache of every slot.
        groups: the slots of the n tokens; the result of a token without a slot is undefined.
        attend: the attention of a run of slots.

    Returns:
        (n, d).
    """
    _, heads, _, head_dim = cross.k.shape
    out = torch.zeros_like(q)
    for slot, slots, first, per_slot, cache in _runs_by_cache(groups, cross):
        k, v = cache.k[slot : slot + slots], cache.v[slot : slot + slots]
        if cross.k_scale is not None and cross.v_scale is not None:
            k = (k * cross.k_scale[slot : slot + slots, :, None]).to(q.dtype)
            v = (v * cross.v_scale[slot : slot + slots, :, None]).to(q.dtype)
        tokens = slice(first, first + slots * per_slot)
        query = q[tokens].view(slots, per_slot, heads, head_dim).transpose(1, 2)
        output = attend(query, k, v, cache.log_weights)
        out[tokens] = output.transpose(1, 2).reshape(slots * per_slot, heads * head_dim)
    return out


def _runs_by_cache(
    groups: SlotGroups, cross: CrossKV
) -> Iterator[tuple[int, int, int, int, CrossKV]]:
    """Split runs of groups by cache; yield (slot, slots, first token, tokens per slot, cache)."""
    for slot, slots, first, per_slot in groups.runs:
        caches = [cross] * slots
        if cross.short is not None:
            caches = [short or cross for short in cross.short[slot : slot + slots]]
        n_done = 0
        for _, same in itertools.groupby(caches, id):
            count = len(list(same))
            yield slot + n_done, count, first + n_done * per_slot, per_slot, caches[n_done]
            n_done += count


def token_probability(logits: torch.Tensor, text: torch.Tensor, n_ids: int) -> torch.Tensor:
    """Return the probability of each token among the tokens with ids below `n_ids`.

    Args:
        logits: float32 (n, n_vocab).
        text: int64 (n,), the tokens.
        n_ids: the number of ids to compare, greater than each of the tokens.

    Returns:
        float32 (n,).
    """
    allowed = logits[:, :n_ids]
    return (allowed.gather(1, text[:, None])[:, 0] - allowed.logsumexp(dim=1)).exp()
