"""The decoder network with its caches, and one step over rows.

It follows OpenAI's `whisper/model.py`. The scale of queries, 1/8 for 64-dimensional heads, is
folded into their projection, which is exact. Query, key and value are one matrix.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal

import torch

from serve.contract.config import CrossPrecision
from serve.contract.manifest import HEAD_DIM, Dims
from serve.native.kernels.choose import Ops
from serve.native.kernels.reference_ops import CrossKV, Matrix, linear
from serve.native.kernels.step_batch import StepBatch
from serve.native.short_cross_cache import ShortCaches
from serve.native.weights import Attention, Loader, Mlp, Weights

_CROSS_ROWS = 32  # windows times layers; their keys and values are projected together


@dataclasses.dataclass(frozen=True)
class Cache:
    """Static key/value caches of every row and every slot.

    The caches of self-attention are indexed by row, (layers, rows, n_text_ctx, heads, 64) each. The
    cache of cross-attention is indexed by slot, (layers, 2, slots, heads, n_audio_ctx, 64), keys
    before values. It may be int8 with one scale per channel, (layers, 2, slots, heads, 64).
    """

    self_k: torch.Tensor
    self_v: torch.Tensor
    cross: torch.Tensor
    cross_scale: torch.Tensor | None
    short: ShortCaches | None = None  # on a CPU

    def cross_kv(self, layer: int) -> CrossKV:
        """Return the keys and values that a layer's cross-attention reads."""
        k, v = self.cross[layer]
        if self.cross_scale is not None:
            return CrossKV(k, v, *self.cross_scale[layer])
        return CrossKV(k, v, short=None if self.short is None else self.short.by_slot(layer))

    def cross_keys(
        self, layers: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor, frames: int
    ) -> torch.Tensor:
        """Return the cross-attention keys of some heads.

        Args:
            layers, heads: int64 (n,), the layer and the index of each head.
            slots: int64 (windows,).
            frames: the number of frames; the values after a shorter window are undefined.

        Returns:
            float32 (windows, n, frames, 64).
        """
        if self.short is not None:
            return self.short.cross_keys(layers, slots.tolist(), heads, frames)
        index = (layers, 0, slots[:, None], heads)
        keys = self.cross[(*index, slice(frames))].float()
        if self.cross_scale is not None:
            keys = keys * self.cross_scale[index][:, :, None]
        return keys

    @property
    def device(self) -> torch.device:
        """The device of the caches."""
        return self.cross.device


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """Weights of one decoder layer."""

    attn: Attention
    cross: Attention
    mlp: Mlp


def _layers(load: Loader, side: str, count: int, ops: Ops) -> list[DecoderLayer]:
    """Load the layers, with matrices in the layout of the operations."""
    keep_int8, store = ops.reads_int8, ops.decoder.store

    def stored(block: Attention) -> Attention:
        return dataclasses.replace(block, qkv=store(block.qkv), out=store(block.out))

    layers: list[DecoderLayer] = []
    for i in range(count):
        prefix = f"{side}.layers.{i}"
        mlp = load.mlp(prefix, keep_int8)
        layers.append(
            DecoderLayer(
                stored(load.attention(f"{prefix}.attn", packed=True, keep_int8=keep_int8)),
                stored(load.attention(f"{prefix}.cross", packed=False, keep_int8=keep_int8)),
                dataclasses.replace(mlp, fc1=store(mlp.fc1), fc2=store(mlp.fc2)),
            )
        )
    return layers


class Decoder:
    """A loaded decoder.

    Args:
        dims: the sizes from the engine's manifest.
        weights: tensors as the engine stores them, on any device.
        device: the device to compute on.
        ops: the operations and their dtype; layer norms are always float32.
        side: the engine's main decoder or its draft decoder.
    """

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        device: torch.device,
        ops: Ops,
        side: Literal["decoder", "draft"] = "decoder",
    ) -> None:
        self.dims = dims
        self.device = device
        self.dtype = ops.dtype
        self.ops = ops
        load = Loader(weights, device, self.dtype)
        self._tokens, logits = load.vocabulary(side, ops.int8_vocabulary)
        self._text_positions = load.positions(side)
        self._layers = _layers(load, side, dims.n_text_layer, ops)
        self._cross_weight, self._cross_bias = load.cross_kv(side, dims.n_text_layer)
        self._norm = load.norm(f"{side}.norm")
        self._logits = ops.decoder.store(logits)

    def new_cache(self, slots: int, rows: int, cross_kv: CrossPrecision = "full") -> Cache:
        """Allocate zeroed caches for `slots` windows and `rows` sequences."""
        dims = self.dims

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((dims.n_text_layer, *shape), dtype=dtype, device=self.device)

        self_shape = (rows, dims.n_text_ctx, dims.n_text_head, HEAD_DIM)
        self_k, self_v = (zeros(*self_shape, dtype=self.dtype) for _ in "kv")
        int8 = cross_kv == "int8"
        cross_dtype = torch.int8 if int8 else self.dtype
        cross_shape = (2, slots, dims.n_text_head)
        cross = zeros(*cross_shape, dims.n_audio_ctx, HEAD_DIM, dtype=cross_dtype)
        scale = zeros(*cross_shape, HEAD_DIM, dtype=torch.float32) if int8 else None
        shortens = self.device.type == "cpu" and not int8
        return Cache(self_k, self_v, cross, scale, ShortCaches(cross) if shortens else None)

    def cache_bytes(self, slots: int, rows: int, cross_kv: CrossPrecision) -> int:
        """Return the bytes of a new cache, without those of short windows."""
        dims, itemsize = self.dims, self.dtype.itemsize
        int8_bytes = dims.n_audio_ctx + 4  # of a channel: its values and their scale
        slot_bytes = int8_bytes if cross_kv == "int8" else dims.n_audio_ctx * itemsize
        channels = 2 * dims.n_text_layer * dims.n_text_state  # keys and values
        return channels * (slots * slot_bytes + rows * dims.n_text_ctx * itemsize)

    def fill_cross(self, encoded: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        """Project the encoder's output (batch, n_frames, d) into the caches of int64 `slots`.

        The frames after the first `n_frames` keep their values, or get the keys and values of
        silence if `ShortCaches` has a cache for windows of `n_frames` frames.
        """
        dims, n_frames = self.dims, encoded.shape[1]
        cross = cache.cross
        if cache.short is not None:
            cross = cache.short.assign(n_frames, slots.tolist())
        width = 2 * dims.n_text_state  # columns of one layer
        n_layers = max(1, _CROSS_ROWS // len(encoded))  # layers of one product
        for begin in range(0, dims.n_text_layer, n_layers):
            end = min(begin + n_layers, dims.n_text_layer)
            rows = slice(begin * width, end * width)
            part = Matrix(self._cross_weight[rows], self._cross_bias[rows])
            scale = None if cache.cross_scale is None else cache.cross_scale[begin:end]
            cross_part = cross[begin:end, ..., :n_frames, :]
            self.ops.decoder.store_cross(linear(encoded, part), slots, cross_part, scale)

    def step(
        self,
        batch: StepBatch,
        cache: Cache,
        logit_indices: torch.Tensor | None = None,
        queries: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute one step over a batch of tokens, with one or several tokens per row.

        Args:
            batch: the batch of n tokens; their keys and values are written into `cache`.
            cache: the caches of all rows and slots.
            logit_indices: int64 (m,), indices of the tokens that need logits; None: all.
            queries: receives the scaled queries of cross-attention, (n, d) by layer.

        Returns:
            float32 (m, n_vocab), the logits of the next tokens.
        """
        ops = self.ops.decoder
        x = ops.embed(batch, self._tokens, self._text_positions)
        for i, layer in enumerate(self._layers):
            qkv = ops.norm_linear(x, layer.attn.norm, layer.attn.qkv)
            attended = ops.self_attention(qkv, cache.self_k[i], cache.self_v[i], batch)
            x = ops.linear_residual(attended, layer.attn.out, x)
            query = ops.norm_linear(x, layer.cross.norm, layer.cross.qkv)
            if queries is not None:
                query = queries[i] = ops.finish(query)
            attended = ops.cross_attention(query, cache.cross_kv(i), batch.groups)
            x = ops.linear_residual(attended, layer.cross.out, x)
            hidden = ops.norm_linear_gelu(x, layer.mlp.norm, layer.mlp.fc1)
            x = ops.linear_residual(hidden, layer.mlp.fc2, x)
        if queries is not None:  # in an abridged decoder, stand in for the missing layers
            queries |= dict.fromkeys(range(len(queries), self.dims.n_text_layer), query)
        logits: torch.Tensor = ops.logits(x, self._norm, self._logits, logit_indices)
        return logits

    @contextlib.contextmanager
    def abridged(self) -> Iterator[None]:
        """Use at most two layers inside the context; further layers launch the same kernels."""
        all_layers, self._layers = self._layers, self._layers[:2]
        try:
            yield
        finally:
            self._layers = all_layers
