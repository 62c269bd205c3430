"""The operations of one Whisper layer in plain torch. They define what is right.

A faster kernel has the signature of its twin here and is tested against it. Nothing here waits for
the device, so a decoder step made of these can be captured in a CUDA graph.
"""

import contextlib
import dataclasses

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYER_NORM_EPS = 1e-5
FP8_MAX = 448.0  # of e4m3


@dataclasses.dataclass(frozen=True)
class Norm:
    """Layer norm parameters, float32 (d,)."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A linear layer: weight (out, in) and bias (out,) or None, in the compute dtype.

    With `scale`, float32 (out,), the weight is int8 and each row stands for weight * scale.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Scaled:
    """FP8 (e4m3) rows: values (..., in), of which each row stands for values * scale (rows,)."""

    values: torch.Tensor
    scale: torch.Tensor


def scaled(x: torch.Tensor) -> Scaled:
    """Rows as FP8, each scaled by its largest number."""
    value = x.float()
    scale = value.abs().amax(dim=-1).clamp_min(1e-12) / FP8_MAX
    return Scaled((value / scale[..., None]).to(torch.float8_e4m3fn), scale.flatten())


def prepare(matrix: Matrix) -> Matrix:
    """What the encoder's products read of a matrix: here, the matrix."""
    return matrix


def stem(
    features: torch.Tensor, conv1: Matrix, conv2: Matrix, positions: torch.Tensor
) -> torch.Tensor:
    """The two convolutions, GELU after each, and the positions.

    Args:
        features: float32 (batch, n_mels, time).
        conv1, conv2: three wide, the second with stride 2; weights (out, 3 * in), taps outermost.
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
    """Linear, exact (erf) GELU: (..., in) -> (..., out)."""
    return F.gelu(linear(x, matrix))


def add_linear_norm(
    x: torch.Tensor, y: torch.Tensor, matrix: Matrix, shift: torch.Tensor, params: Norm
) -> torch.Tensor:
    """x += linear(y) in place, then layer norm of x + shift.

    The stream goes without the biases of what is added to it, so that it is rounded once each time:
    their sum so far is `shift`.

    Args:
        x: the residual stream (..., d).
        y: (..., in), or what `linear_gelu` of the same operations returned.
        matrix: in -> d, without a bias.
        shift: float32 (d,).
        params: of the layer norm.

    Returns:
        The layer norm (..., d), as the next linear layer of the same operations reads it.
    """
    x += linear(y, matrix)
    return norm(x + shift, params).to(x.dtype)


add_linear_last_norm = add_linear_norm
"""The same at the encoder's end: whatever linear layers read, its result is a tensor like `x`."""


def linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """A linear layer: (..., in) -> (..., out)."""
    weight = matrix.weight
    if matrix.scale is not None:
        weight = (weight * matrix.scale[:, None]).to(x.dtype)
    return F.linear(x, weight, matrix.bias)


def norm(x: torch.Tensor, params: Norm) -> torch.Tensor:
    """Layer norm over the last dimension, computed in float32, returned in the dtype of `x`."""
    y = F.layer_norm(x.float(), params.weight.shape, params.weight, params.bias, LAYER_NORM_EPS)
    return y.to(x.dtype)


def norm_linear(x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
    """Layer norm, then a linear layer: (..., in) -> (..., out)."""
    return linear(norm(x, params), matrix)


def norm_linear_gelu(x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
    """Layer norm, linear, exact (erf) GELU: (..., in) -> (..., out)."""
    return F.gelu(norm_linear(x, params, matrix))


def linear_residual(x: torch.Tensor, matrix: Matrix, residual: torch.Tensor) -> torch.Tensor:
    """A linear layer added to the residual stream: (..., in) -> (..., out)."""
    return residual + linear(x, matrix)


def logits(x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
    """Layer norm, then the vocabulary projection: (rows, in) -> float32 (rows, vocabulary)."""
    return norm_linear(x, params, matrix).float()


def embed(
    ids: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Each slot's token at its position, embedded, plus the position's own embedding.

    Args:
        ids: int64 (slots, n_text_ctx), at least as many rows as `positions`.
        positions: int64 (slots,).
        tokens: (n_vocab, d).
        places: (n_text_ctx, d).

    Returns:
        (slots, d).
    """
    rows = torch.arange(len(positions), device=positions.device)
    return tokens[ids[rows, positions]] + places[positions]


def encoder_attention(qkv: torch.Tensor, n_head: int) -> torch.Tensor:
    """Full (non-causal) self-attention; the query is already scaled.

    Args:
        qkv: (batch, time, 3 * d), query, key and value side by side.
        n_head: heads; d / n_head dimensions each.

    Returns:
        (batch, time, d).
    """
    batch, time, _ = qkv.shape
    q, k, v = qkv.view(batch, time, 3, n_head, -1).permute(2, 0, 3, 1, 4)
    with _cudnn_first() if qkv.is_cuda else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out.transpose(1, 2).reshape(batch, time, -1)


def _cudnn_first() -> contextlib.AbstractContextManager[None]:
    """Prefer cuDNN's attention, which torch by itself tries after FlashAttention."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def self_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One decoder step of causal self-attention for slots of different ages.

    Writes each slot's new key and value at its position, then attends to positions 0..position.

    Args:
        qkv: (slots, 3 * d), the query already scaled.
        k_cache, v_cache: (slots, heads, length, head_dim), updated in place; every position is
            below `length`, and what lies behind the last of them only costs time.
        positions: int64 (slots,).

    Returns:
        (slots, d).
    """
    slots, heads, length, head_dim = k_cache.shape
    q, k, v = qkv.view(slots, 3, heads, 1, head_dim).unbind(1)
    at = positions.view(slots, 1, 1, 1).expand(slots, heads, 1, head_dim)
    k_cache.scatter_(2, at, k)
    v_cache.scatter_(2, at, v)
    seen = torch.arange(length, device=positions.device) <= positions[:, None]
    out = F.scaled_dot_product_attention(
        q, k_cache, v_cache, attn_mask=seen[:, None, None, :], scale=1.0
    )
    return out.reshape(slots, heads * head_dim)


@dataclasses.dataclass(frozen=True)
class CrossKV:
    """One layer's keys and values of cross-attention, (slots, heads, n_audio_ctx, head_dim).

    With scales, float32 (slots, heads, head_dim), they are int8 and stand for number * scale.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def store_cross(
    x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Put projected keys and values of windows into their slots.

    Args:
        x: (windows, n_audio_ctx, layers * 2 * d), keys and values of some layers side by side.
        slots: int64 (windows,).
        cache: (layers, 2, slots, heads, n_audio_ctx, head_dim), written at `slots`.
        scale: float32 (layers, 2, slots, heads, head_dim); with it, each channel of a slot's head
            is scaled by its largest number, and rounded (half away from zero) to int8.
    """
    layers, _, _, heads, time, head_dim = cache.shape
    value = x.view(len(x), time, layers, 2, heads, head_dim).permute(2, 3, 0, 4, 1, 5)
    if scale is not None:
        step = value.float().abs().amax(dim=-2) / 127.0
        scale.index_copy_(2, slots, step)
        scaled = value.float() * (1.0 / step.clamp_min(1e-30))[..., None, :]
        value = (scaled.abs() + 0.5).floor().copysign(scaled).clamp(-127, 127).to(torch.int8)
    cache.index_copy_(2, slots, value)


def cross_attention(q: torch.Tensor, cross: CrossKV) -> torch.Tensor:
    """One decoder step of attention to the encoder's output.

    Args:
        q: (slots, d), already scaled.
        cross: of the same slots.

    Returns:
        (slots, d).
    """
    slots, heads, _, head_dim = cross.k.shape
    k, v = cross.k, cross.v
    if cross.k_scale is not None and cross.v_scale is not None:
        k = (k * cross.k_scale[:, :, None]).to(q.dtype)
        v = (v * cross.v_scale[:, :, None]).to(q.dtype)
    out = F.scaled_dot_product_attention(q.view(slots, heads, 1, head_dim), k, v, scale=1.0)
    return out.reshape(slots, heads * head_dim)
