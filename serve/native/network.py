"""The network: the encoder over a batch of windows, and one decoder step over rows.

Follows OpenAI's `whisper/model.py`. The query's scale, 1/8 for 64-dimensional heads and so exact,
is folded into its projection; query, key and value are one matrix.
"""

import dataclasses
import itertools
from typing import Any

import torch

from serve.config import CrossPrecision
from serve.engine import HEAD_DIM, Dims, scale_name
from serve.native.kernels.choose import Activation, EncoderOps, Ops, torch_only
from serve.native.kernels.definition import (
    CrossKV,
    Feed,
    Groups,
    Matrix,
    Norm,
    encoder_attention,
    linear,
)

Weights = dict[str, torch.Tensor]
_CROSS_ROWS = 32  # windows times layers whose keys and values are projected in one go


@dataclasses.dataclass(frozen=True)
class Cache:
    """Static key/value caches of every row and every slot.

    Those of self-attention are by row, (layers, rows, n_text_ctx, heads, 64) each; those of
    cross-attention by slot, (layers, 2, slots, heads, n_audio_ctx, 64), keys before values, and may
    be int8 with a scale per channel, (layers, 2, slots, heads, 64).
    """

    self_k: torch.Tensor
    self_v: torch.Tensor
    cross: torch.Tensor
    cross_scale: torch.Tensor | None

    def cross_kv(self, layer: int) -> CrossKV:
        """What cross-attention of a layer reads."""
        k, v = self.cross[layer]
        if self.cross_scale is None:
            return CrossKV(k, v)
        return CrossKV(k, v, *self.cross_scale[layer])

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.cross.device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(tensor.nbytes for tensor in fields if tensor is not None)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Weights of one attention block; in cross-attention `qkv` is the query alone."""

    norm: Norm
    qkv: Matrix
    out: Matrix


@dataclasses.dataclass(frozen=True)
class Mlp:
    """Weights of one feed-forward block."""

    norm: Norm
    fc1: Matrix
    fc2: Matrix


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """Weights of one decoder layer."""

    attn: Attention
    cross: Attention
    mlp: Mlp


class Loader:
    """Turns an engine's tensors into compute-ready weights on one device.

    INT8 matrices are expanded once, which on a CPU measures faster than reading them as stored, and
    which the encoder's arithmetic on a GPU wants too. `keep_int8` leaves them as they are for
    kernels that read them so.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor in the compute dtype, or the one given."""
        return self._weights[name].to(self._device, dtype or self._dtype)

    def matrix(
        self, name: str, factor: float = 1.0, bias: bool = True, keep_int8: bool = False
    ) -> Matrix:
        """A linear layer times a power of two; int8 only if stored and kept so."""
        offset = None
        if bias:
            offset = (self.tensor(f"{name}.bias", torch.float32) * factor).to(self._dtype)
        stored = self._weights[f"{name}.weight"].to(self._device)
        scale = self._weights.get(scale_name(f"{name}.weight"))
        if scale is not None:
            scale = scale.to(self._device).float()
            if keep_int8:
                return Matrix(stored, offset, scale * factor)
        weight = stored.float()
        if scale is not None:
            weight = weight * scale[:, None]
        return Matrix((weight * factor).to(self._dtype), offset)

    def norm(self, name: str) -> Norm:
        """Layer norm parameters, float32."""
        return Norm(
            self.tensor(f"{name}.weight", torch.float32), self.tensor(f"{name}.bias", torch.float32)
        )

    def convolution(self, name: str) -> Matrix:
        """A convolution as a matrix over its taps' inputs, taps outermost."""
        weight = self.tensor(f"{name}.weight").transpose(1, 2).flatten(1).contiguous()
        return Matrix(weight, self.tensor(f"{name}.bias"))

    def attention(self, prefix: str, packed: bool, keep_int8: bool = False) -> Attention:
        """Self-attention with q, k and v in one matrix, or cross-attention with q alone."""
        query = self.matrix(f"{prefix}.q", factor=HEAD_DIM**-0.5, keep_int8=keep_int8)
        if packed:
            key = self.matrix(f"{prefix}.k", bias=False, keep_int8=keep_int8)
            query = _packed(query, key, self.matrix(f"{prefix}.v", keep_int8=keep_int8))
        out = self.matrix(f"{prefix}.out", keep_int8=keep_int8)
        return Attention(self.norm(f"{prefix}_norm"), query, out)

    def mlp(self, prefix: str, keep_int8: bool = False) -> Mlp:
        """One feed-forward block."""
        return Mlp(
            self.norm(f"{prefix}.mlp_norm"),
            self.matrix(f"{prefix}.mlp.fc1", keep_int8=keep_int8),
            self.matrix(f"{prefix}.mlp.fc2", keep_int8=keep_int8),
        )

    def cross_kv(self, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of every layer's cross-attention keys and values, one below the other."""
        weights, biases = [], []
        for i in range(layers):
            key = self.matrix(f"decoder.layers.{i}.cross.k", bias=False)
            value = self.matrix(f"decoder.layers.{i}.cross.v")
            assert value.bias is not None
            weights += [key.weight, value.weight]
            biases += [torch.zeros_like(value.bias), value.bias]
        return torch.cat(weights), torch.cat(biases)

    def logits(self, keep_int8: bool) -> Matrix:
        """The vocabulary projection: its own INT8 matrix, or the embedding itself."""
        if "decoder.logits.weight" in self._weights:
            return self.matrix("decoder.logits", bias=False, keep_int8=keep_int8)
        return Matrix(self.tensor("decoder.tokens"), None)


def _packed(query: Matrix, key: Matrix, value: Matrix) -> Matrix:
    """One matrix that gives query, key and value side by side."""
    assert query.bias is not None and value.bias is not None
    scales = [m.scale for m in (query, key, value) if m.scale is not None]
    return Matrix(
        torch.cat([query.weight, key.weight, value.weight]),
        torch.cat([query.bias, torch.zeros_like(query.bias), value.bias]),
        torch.cat(scales) if scales else None,
    )


@dataclasses.dataclass(frozen=True)
class EncoderLayer:
    """Weights of one encoder layer; see `add_linear_norm` in `definition` for the shifts."""

    attn: Attention
    mlp: Mlp
    attn_shift: torch.Tensor  # what the residual stream lacks after this layer's attention
    mlp_shift: torch.Tensor


def _encoder_layers(load: Loader, count: int, ops: EncoderOps[Any]) -> list[EncoderLayer]:
    """The layers, their matrices as the operations read them."""
    layers: list[EncoderLayer] = []
    for i in range(count):
        attn = load.attention(f"encoder.layers.{i}.attn", packed=True)
        mlp = load.mlp(f"encoder.layers.{i}")
        assert attn.out.bias is not None and mlp.fc2.bias is not None
        begin = layers[-1].mlp_shift if layers else torch.zeros_like(attn.norm.bias)
        attn_shift = begin + attn.out.bias.float()
        mlp_shift = attn_shift + mlp.fc2.bias.float()
        out, fc2 = (dataclasses.replace(matrix, bias=None) for matrix in (attn.out, mlp.fc2))
        attn = dataclasses.replace(attn, qkv=ops.prepare(attn.qkv), out=ops.prepare(out))
        mlp = dataclasses.replace(mlp, fc1=ops.prepare(mlp.fc1), fc2=ops.prepare(fc2))
        layers.append(EncoderLayer(attn, mlp, attn_shift, mlp_shift))
    return layers


def _decoder_layers(load: Loader, count: int, ops: Ops) -> list[DecoderLayer]:
    """The layers, their matrices as the operations read them."""
    keep, store = ops.reads_int8, ops.decoder.store

    def stored(block: Attention) -> Attention:
        return dataclasses.replace(block, qkv=store(block.qkv), out=store(block.out))

    layers: list[DecoderLayer] = []
    for i in range(count):
        prefix = f"decoder.layers.{i}"
        mlp = load.mlp(prefix, keep)
        layers.append(
            DecoderLayer(
                stored(load.attention(f"{prefix}.attn", packed=True, keep_int8=keep)),
                stored(load.attention(f"{prefix}.cross", packed=False, keep_int8=keep)),
                dataclasses.replace(mlp, fc1=store(mlp.fc1), fc2=store(mlp.fc2)),
            )
        )
    return layers


class Whisper:
    """A loaded network.

    Args:
        dims: sizes from the engine's manifest.
        weights: tensors as the engine stores them, on any device.
        device, dtype: where and in what precision to compute; layer norms are float32 always.
        ops: the operations to compute with; without, plain torch.
    """

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops | None = None,
    ) -> None:
        self.dims = dims
        self.device = device
        self.dtype = dtype
        self.ops = ops or torch_only("none were given")
        load = Loader(weights, device, dtype)
        self._stem = (load.convolution("encoder.conv1"), load.convolution("encoder.conv2"))
        self._audio_positions = load.tensor("encoder.positions")
        self._encoder = _encoder_layers(load, dims.n_audio_layer, self.ops.encoder)
        self._encoder_norm = load.norm("encoder.norm")
        self._tokens = load.tensor("decoder.tokens")
        self._text_positions = load.tensor("decoder.positions")
        self._decoder = _decoder_layers(load, dims.n_text_layer, self.ops)
        self._cross_weight, self._cross_bias = load.cross_kv(dims.n_text_layer)
        self._decoder_norm = load.norm("decoder.norm")
        self._logits = self.ops.decoder.store(load.logits(self.ops.reads_int8))

    def new_cache(self, slots: int, rows: int, cross_kv: CrossPrecision = "full") -> Cache:
        """Zeroed caches for `slots` windows and `rows` sequences."""
        dims = self.dims

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((dims.n_text_layer, *shape), dtype=dtype, device=self.device)

        own = (rows, dims.n_text_ctx, dims.n_text_head, HEAD_DIM)
        own_k, own_v = (zeros(*own, dtype=self.dtype) for _ in "kv")
        int8 = cross_kv == "int8"
        kind = torch.int8 if int8 else self.dtype
        heads = (2, slots, dims.n_text_head)
        cross = zeros(*heads, dims.n_audio_ctx, HEAD_DIM, dtype=kind)
        scale = zeros(*heads, HEAD_DIM, dtype=torch.float32) if int8 else None
        return Cache(own_k, own_v, cross, scale)

    def slot_bytes(self, cross_kv: CrossPrecision) -> int:
        """Bytes of one slot in the caches: what cross-attention reads of a window."""
        dims = self.dims
        of_channel = dims.n_audio_ctx + 4  # int8, and the scale
        if cross_kv == "full":
            of_channel = dims.n_audio_ctx * self.dtype.itemsize
        return 2 * dims.n_text_layer * dims.n_text_state * of_channel

    def row_bytes(self) -> int:
        """Bytes of one row in the caches: what self-attention reads of a sequence."""
        dims = self.dims
        return 2 * dims.n_text_layer * dims.n_text_state * dims.n_text_ctx * self.dtype.itemsize

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Run the encoder: (batch, n_mels, 3000) float32 -> (batch, n_audio_ctx, d)."""
        ops = self.ops.encoder
        x = ops.stem(features.to(self.device), *self._stem, self._audio_positions)
        last = self._encoder[-1]
        normed = ops.norm(x, self._encoder[0].attn.norm)
        # Each layer ends with the layer norm that the next one begins with.
        for layer, following in itertools.pairwise(self._encoder):
            hidden = self._attend_and_widen(ops, layer, x, normed)
            normed = ops.add_linear_norm(
                x, hidden, layer.mlp.fc2, layer.mlp_shift, following.attn.norm
            )
        hidden = self._attend_and_widen(ops, last, x, normed)
        return ops.add_linear_last_norm(x, hidden, last.mlp.fc2, last.mlp_shift, self._encoder_norm)

    def _attend_and_widen(
        self,
        ops: EncoderOps[Activation],
        layer: EncoderLayer,
        x: torch.Tensor,
        normed: Activation,
    ) -> Activation:
        """An encoder layer but for its last product: `x` is updated, the wide layer returned."""
        mixed = encoder_attention(ops.linear(normed, layer.attn.qkv), self.dims.n_audio_head)
        normed = ops.add_linear_norm(x, mixed, layer.attn.out, layer.attn_shift, layer.mlp.norm)
        return ops.linear_gelu(normed, layer.mlp.fc1)

    def fill_cross(self, encoded: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        """Project the encoder's output (batch, n_audio_ctx, d) into the caches of int64 `slots`."""
        dims = self.dims
        width = 2 * dims.n_text_state  # of one layer
        each = max(1, _CROSS_ROWS // len(encoded))  # layers at a time
        for begin in range(0, dims.n_text_layer, each):
            end = min(begin + each, dims.n_text_layer)
            rows = slice(begin * width, end * width)
            part = Matrix(self._cross_weight[rows], self._cross_bias[rows])
            scale = None if cache.cross_scale is None else cache.cross_scale[begin:end]
            self.ops.decoder.store_cross(
                linear(encoded, part), slots, cache.cross[begin:end], scale
            )

    def step(self, feed: Feed, cache: Cache, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Feed tokens to rows, one or several each.

        Args:
            feed: n tokens; their keys and values are written into `cache`.
            cache: of every row and slot.
            wanted: int64 (m,), indices of the feeds whose logits are asked for; None = every one's.

        Returns:
            float32 logits (m, n_vocab) for the tokens that follow.
        """
        ops = self.ops.decoder
        x = ops.embed(feed, self._tokens, self._text_positions)
        for i, layer in enumerate(self._decoder):
            qkv = ops.norm_linear(x, layer.attn.norm, layer.attn.qkv)
            mixed = ops.self_attention(qkv, cache.self_k[i], cache.self_v[i], feed)
            x = ops.linear_residual(mixed, layer.attn.out, x)
            query = ops.norm_linear(x, layer.cross.norm, layer.cross.qkv)
            mixed = ops.cross_attention(query, cache.cross_kv(i), feed.groups)
            x = ops.linear_residual(mixed, layer.cross.out, x)
            hidden = ops.norm_linear_gelu(x, layer.mlp.norm, layer.mlp.fc1)
            x = ops.linear_residual(hidden, layer.mlp.fc2, x)
        return ops.logits(x, self._decoder_norm, self._logits, wanted)

    @torch.inference_mode()
    def teacher_forced_logits(
        self, features: torch.Tensor, tokens: torch.Tensor, cross_kv: CrossPrecision = "full"
    ) -> torch.Tensor:
        """Logits after each given token, through the very steps that serving runs.

        Args:
            features: float32 (batch, n_mels, 3000).
            tokens: int64 (batch, time), time at most n_text_ctx.
            cross_kv: as in `new_cache`.

        Returns:
            float32 (batch, time, n_vocab).
        """
        batch, time = tokens.shape
        cache = self.new_cache(batch, batch, cross_kv)
        everyone = torch.arange(batch, device=self.device)
        self.fill_cross(self.encode(features), cache, everyone)
        ids, groups = tokens.to(self.device).contiguous(), one_each(everyone)
        steps = []
        for t in range(time):
            at = torch.full_like(everyone, t)
            steps.append(self.step(Feed(ids, everyone, at, groups, None, False, t + 1), cache))
        return torch.stack(steps, dim=1)


def one_each(slots: torch.Tensor) -> Groups:
    """Groups of one feed each, for int64 `slots` (n,)."""
    each = torch.arange(len(slots), device=slots.device)
    return Groups(slots, each, torch.ones_like(slots), torch.zeros_like(slots).bool(), 1)
