"""An engine's tensors, ready to compute with."""

import dataclasses

import torch

from serve.contract.engine import HEAD_DIM, scale_name
from serve.native.kernels.definition import Matrix, Norm

Weights = dict[str, torch.Tensor]


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
        # Of what is added up from layer to layer, for which bfloat16 has too few digits.
        self._stream = torch.float32 if dtype == torch.bfloat16 else dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor in the compute dtype, or the one given."""
        return self._weights[name].to(self._device, dtype or self._dtype)

    def positions(self, side: str) -> torch.Tensor:
        """Embeddings of positions, as the residual stream is."""
        return self.tensor(f"{side}.positions", self._stream)

    def matrix(
        self, name: str, factor: float = 1.0, bias: bool = True, keep_int8: bool = False
    ) -> Matrix:
        """A linear layer times a power of two; int8 only if stored and kept so."""
        offset = None
        if bias:
            offset = (self.tensor(f"{name}.bias", torch.float32) * factor).to(self._dtype)
        stored, scale = self._stored(f"{name}.weight")
        if scale is not None and keep_int8:
            return Matrix(stored, offset, scale * factor)
        return Matrix((_expanded(stored, scale) * factor).to(self._dtype), offset)

    def vocabulary(self, side: str, keep_int8: bool) -> tuple[torch.Tensor, Matrix]:
        """The embedding in the compute dtype, and the projection that is tied to it.

        Logits are as the residual stream is: bfloat16 has too few digits for them.
        """
        stored, scale = self._stored(f"{side}.tokens")
        whole = _expanded(stored, scale)
        tokens = whole.to(self._dtype)
        if scale is not None and keep_int8:
            return tokens, Matrix(stored, None, scale)
        return tokens, Matrix(tokens if self._stream == self._dtype else whole, None)

    def _stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A matrix as stored, and where that is int8 the float32 scale of its rows."""
        scale = self._weights.get(scale_name(name))
        stored = self._weights[name].to(self._device)
        return stored, None if scale is None else scale.to(self._device).float()

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

    def cross_kv(self, side: str, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of every layer's cross-attention keys and values, one below the other."""
        weights, biases = [], []
        for i in range(layers):
            key = self.matrix(f"{side}.layers.{i}.cross.k", bias=False)
            value = self.matrix(f"{side}.layers.{i}.cross.v")
            assert value.bias is not None
            weights += [key.weight, value.weight]
            biases += [torch.zeros_like(value.bias), value.bias]
        return torch.cat(weights), torch.cat(biases)


def _expanded(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the matrix that is stored, float32."""
    return stored.float() if scale is None else stored.float() * scale[:, None]


def _packed(query: Matrix, key: Matrix, value: Matrix) -> Matrix:
    """One matrix that gives query, key and value side by side."""
    assert query.bias is not None and value.bias is not None
    scales = [m.scale for m in (query, key, value) if m.scale is not None]
    return Matrix(
        torch.cat([query.weight, key.weight, value.weight]),
        torch.cat([query.bias, torch.zeros_like(query.bias), value.bias]),
        torch.cat(scales) if scales else None,
    )
