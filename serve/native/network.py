"""The Whisper network: its encoder and its decoder, as in OpenAI's `whisper/model.py`."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from serve.contract.config import CrossPrecision
from serve.contract.manifest import Dims
from serve.native.decoder import Decoder
from serve.native.kernels.choose import Ops, torch_only
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.weights import Attention, Loader, Mlp, Weights


@dataclasses.dataclass(frozen=True)
class EncoderLayer:
    """Weights of one encoder layer.

    The residual stream omits biases; a shift is the sum of those omitted so far. See
    `reference_ops.add_linear_norm`.
    """

    attn: Attention
    mlp: Mlp
    attn_shift: torch.Tensor  # float32 (d,), after the attention
    mlp_shift: torch.Tensor  # float32 (d,), after the feed-forward block


def _encoder_layers(load: Loader, count: int, ops: Any) -> list[EncoderLayer]:
    """Load the layers, with matrices in the layout of `ops`.

    The outputs get no bias. Instead, a layer has the sums of all biases up to its two blocks.
    """
    layers: list[EncoderLayer] = []
    for i in range(count):
        attn = load.attention(f"encoder.layers.{i}.attn", packed=True)
        mlp = load.mlp(f"encoder.layers.{i}")
        assert attn.out.bias is not None and mlp.fc2.bias is not None
        previous_shift = layers[-1].mlp_shift if layers else torch.zeros_like(attn.norm.bias)
        attn_shift = previous_shift + attn.out.bias.float()
        mlp_shift = attn_shift + mlp.fc2.bias.float()
        out, fc2 = (dataclasses.replace(matrix, bias=None) for matrix in (attn.out, mlp.fc2))
        attn = dataclasses.replace(attn, qkv=ops.prepare(attn.qkv), out=ops.prepare(out))
        fc1 = ops.prepare(mlp.fc1, mlp.norm)
        mlp = dataclasses.replace(mlp, fc1=fc1, fc2=ops.prepare(fc2))
        layers.append(EncoderLayer(attn, mlp, attn_shift, mlp_shift))
    return layers


class Whisper(Decoder):
    """A loaded encoder and decoder.

    Args:
        dims: the sizes from the engine's manifest.
        weights: tensors as the engine stores them, on any device.
        device: the device to compute on.
        ops: the operations and their dtype; None: plain torch in float32.
    """

    def __init__(
        self, dims: Dims, weights: Weights, device: torch.device, ops: Ops | None = None
    ) -> None:
        super().__init__(dims, weights, device, ops or torch_only("none were given"))
        load = Loader(weights, device, self.dtype)
        self._stem = (load.convolution("encoder.conv1"), load.convolution("encoder.conv2"))
        self._audio_positions = load.positions("encoder")
        self._encoder = _encoder_layers(load, dims.n_audio_layer, self.ops.encoder)
        self._encoder_norm = load.norm("encoder.norm")

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Run the encoder: (batch, n_mels, frames) float32 -> (batch, frames / 2, d).

        A window of 30 s has 3000 frames; fewer frames are a shorter window.
        """
        ops = self.ops.encoder
        positions = self._audio_positions[: features.shape[-1] // 2]
        x = ops.stem(features.to(self.device), *self._stem, positions)
        last = self._encoder[-1]
        normed = ops.norm(x, self._encoder[0].attn.norm)
        # `add_linear_norm` includes the layer norm at the start of the next layer.
        for layer, following in itertools.pairwise(self._encoder):
            hidden = self._attend_and_widen(layer, x, normed)
            normed = ops.add_linear_norm(
                x, hidden, layer.mlp.fc2, layer.mlp_shift, following.attn.norm
            )
        hidden = self._attend_and_widen(last, x, normed)
        encoded: torch.Tensor = ops.add_linear_last_norm(
            x, hidden, last.mlp.fc2, last.mlp_shift, self._encoder_norm
        )
        return encoded

    @contextlib.contextmanager
    def abridged(self) -> Iterator[None]:
        all_layers, self._encoder = self._encoder, self._encoder[:2]
        try:
            with super().abridged():
                yield
        finally:
            self._encoder = all_layers

    def _attend_and_widen(self, layer: EncoderLayer, x: torch.Tensor, normed: Any) -> Any:
        """Compute an encoder layer without its last product.

        Args:
            layer: the weights.
            x: the residual stream, updated in place.
            normed: x after the layer's first layer norm.

        Returns:
            The output of the layer's first feed-forward matrix.
        """
        ops = self.ops.encoder
        qkv = ops.linear(normed, layer.attn.qkv)
        attended = ops.encoder_attention(qkv, self.dims.n_audio_head)
        normed = ops.add_linear_norm(x, attended, layer.attn.out, layer.attn_shift, layer.mlp.norm)
        return ops.linear_gelu(normed, layer.mlp.fc1)

    @torch.inference_mode()
    def teacher_forced_logits(
        self, features: torch.Tensor, tokens: torch.Tensor, cross_kv: CrossPrecision = "full"
    ) -> torch.Tensor:
        """Compute the logits after each given token with the steps that serving runs.

        Args:
            features: float32 (batch, n_mels, 3000).
            tokens: int64 (batch, time), time at most n_text_ctx.
            cross_kv: the precision of the cross-attention cache.

        Returns:
            float32 (batch, time, n_vocab).
        """
        batch, time = tokens.shape
        cache = self.new_cache(batch, batch, cross_kv)
        rows = torch.arange(batch, device=self.device)
        self.fill_cross(self.encode(features), cache, rows)
        # The same length as in serving, so that sums have the same bits.
        ids = torch.nn.functional.pad(tokens.to(self.device), (0, self.dims.n_text_ctx - time))
        groups = SlotGroups(rows, rows, torch.ones_like(rows), 1)
        steps = []
        for t in range(time):
            positions = torch.full_like(rows, t)
            batch_of_step = StepBatch(ids, rows, positions, groups, None, False, t + 1)
            steps.append(self.step(batch_of_step, cache))
        return torch.stack(steps, dim=1)
