"""Turn an engine's tensors into weights to compute with."""

import dataclasses

import torch

from serve.contract.engine import scale_name
from serve.contract.manifest import HEAD_DIM
from serve.native.kernels.reference_ops import Matrix, Norm

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Weights of one attention block; in cross-attention `qkv` has only the query."""

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
    """A loader of an engine's tensors onto one device.

    INT8 matrices are converted to the compute dtype once. On a CPU this is faster than reading INT8
    in each step, and a GPU's encoder needs it. `keep_int8` keeps them for kernels that read INT8.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype
        # The residual stream is a sum over layers, for which bfloat16 has too few digits.
        self._stream = torch.float32 if dtype == torch.bfloat16 else dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Load a tensor in the compute dtype, or in `dtype`."""
        return self._weights[name].to(self._device, dtype or self._dtype)

    def positions(self, side: str) -> torch.Tensor:
        """Load the position embeddings in the dtype of the residual stream."""
        return self.tensor(f"{side}.positions", self._stream)

    def matrix(
        self, name: str, scale_factor: float = 1.0, bias: bool = True, keep_int8: bool = False
    ) -> Matrix:
        """Load a linear layer times a power of two; INT8 stays INT8 with `keep_int8`."""
        bias_tensor = None
        if bias:
            bias_tensor = self.tensor(f"{name}.bias", torch.float32) * scale_factor
            bias_tensor = bias_tensor.to(self._dtype)
        stored, scale = self._stored(f"{name}.weight")
        if scale is not None and keep_int8:
            return Matrix(stored, bias_tensor, scale * scale_factor)
        return Matrix((_expanded(stored, scale) * scale_factor).to(self._dtype), bias_tensor)

    def vocabulary(self, side: str, keep_int8: bool) -> tuple[torch.Tensor, Matrix]:
        """Load the token embedding in the compute dtype, and the output projection tied to it.

        Logits have the dtype of the residual stream, since bfloat16 has too few digits for them.
        """
        stored, scale = self._stored(f"{side}.tokens")
        expanded = _expanded(stored, scale)
        tokens = expanded.to(self._dtype)
        if scale is not None and keep_int8:
            return tokens, Matrix(stored, None, scale)
        return tokens, Matrix(tokens if self._stream == self._dtype else expanded, None)

    def _stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Load a stored matrix and, if it is int8, the rows' float32 scales."""
        scale = self._weights.get(scale_name(name))
        stored = self._weights[name].to(self._device)
        return stored, None if scale is None else scale.to(self._device).float()

    def norm(self, name: str) -> Norm:
        """Load the float32 parameters of a layer norm."""
        return Norm(
            self.tensor(f"{name}.weight", torch.float32), self.tensor(f"{name}.bias", torch.float32)
        )

    def convolution(self, name: str) -> Matrix:
        """Load a convolution as a matrix over the taps' inputs, taps outermost."""
        weight = self.tensor(f"{name}.weight").transpose(1, 2).flatten(1).contiguous()
        return Matrix(weight, self.tensor(f"{name}.bias"))

    def attention(self, prefix: str, packed: bool, keep_int8: bool = False) -> Attention:
        """Load self-attention with q, k and v in one matrix, or cross-attention with only q."""
        query = self.matrix(f"{prefix}.q", scale_factor=HEAD_DIM**-0.5, keep_int8=keep_int8)
        if packed:
            key = self.matrix(f"{prefix}.k", bias=False, keep_int8=keep_int8)
            query = _stack_qkv(query, key, self.matrix(f"{prefix}.v", keep_int8=keep_int8))
        out = self.matrix(f"{prefix}.out", keep_int8=keep_int8)
        return Attention(self.norm(f"{prefix}_norm"), query, out)

    def mlp(self, prefix: str, keep_int8: bool = False) -> Mlp:
        """Load a feed-forward block."""
        return Mlp(
            self.norm(f"{prefix}.mlp_norm"),
            self.matrix(f"{prefix}.mlp.fc1", keep_int8=keep_int8),
            self.matrix(f"{prefix}.mlp.fc2", keep_int8=keep_int8),
        )

    def cross_kv(self, side: str, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Load the stacked weights and biases of all layers' cross-attention keys and values."""
        weights, biases = [], []
        for i in range(layers):
            key = self.matrix(f"{side}.layers.{i}.cross.k", bias=False)
            value = self.matrix(f"{side}.layers.{i}.cross.v")
            assert value.bias is not None
            weights += [key.weight, value.weight]
            biases += [torch.zeros_like(value.bias), value.bias]
        return torch.cat(weights), torch.cat(biases)


def _expanded(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a stored matrix in float32."""
    return stored.float() if scale is None else stored.float() * scale[:, None]


def _stack_qkv(query: Matrix, key: Matrix, value: Matrix) -> Matrix:
    """Stack the matrices of query, key and value into one."""
    assert query.bias is not None and value.bias is not None
    scales = [matrix.scale for matrix in (query, key, value) if matrix.scale is not None]
    return Matrix(
        torch.cat([query.weight, key.weight, value.weight]),
        torch.cat([query.bias, torch.zeros_like(query.bias), value.bias]),
        torch.cat(scales) if scales else None,
    )
