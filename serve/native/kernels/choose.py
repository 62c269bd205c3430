"""The operations that the network is made of, each chosen once, when an engine is loaded.

`definition` says what each must compute; `decoder` and `encoder` hold the kernels for NVIDIA GPUs
and are imported only where they are chosen.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import torch

from serve.contract.config import EncoderPrecision, Kernels
from serve.contract.engine import Dims
from serve.contract.errors import UnavailableError
from serve.native.kernels import definition
from serve.native.kernels.definition import CrossKV, Matrix, Norm, Scaled
from serve.native.kernels.feed import Feed, Groups

Tensor = torch.Tensor
KernelsName = Literal["torch", "triton"]
Flow = TypeVar("Flow")
"""A linear layer's output as one decoder operation hands it to the next; plain torch: a tensor."""
Activation = TypeVar("Activation")
"""What the encoder's linear layers read; plain torch: a tensor."""


class DecoderOps(Protocol[Flow]):
    """One implementation of the decoder's operations; see `definition` for each."""

    def store(self, matrix: Matrix) -> Matrix:
        """See `definition.store`."""
        ...

    def embed(self, feed: Feed, tokens: Tensor, places: Tensor) -> Tensor:
        """See `definition.embed`."""
        ...

    def norm_linear(self, x: Tensor | Flow, params: Norm, matrix: Matrix) -> Flow:
        """See `definition.norm_linear`."""
        ...

    def norm_linear_gelu(self, x: Tensor | Flow, params: Norm, matrix: Matrix) -> Tensor:
        """See `definition.norm_linear_gelu`."""
        ...

    def linear_residual(self, x: Tensor, matrix: Matrix, residual: Tensor | Flow) -> Flow:
        """See `definition.linear_residual`."""
        ...

    def finish(self, x: Flow) -> Tensor:
        """See `definition.finish`."""
        ...

    def logits(
        self, x: Tensor | Flow, params: Norm, matrix: Matrix, wanted: Tensor | None = None
    ) -> Tensor:
        """See `definition.logits`."""
        ...

    def self_attention(self, qkv: Flow, k_cache: Tensor, v_cache: Tensor, feed: Feed) -> Tensor:
        """See `definition.self_attention`."""
        ...

    def cross_attention(self, q: Flow, cross: CrossKV, groups: Groups) -> Tensor:
        """See `definition.cross_attention`."""
        ...

    def store_cross(self, x: Tensor, slots: Tensor, cache: Tensor, scale: Tensor | None) -> None:
        """See `definition.store_cross`."""
        ...


class EncoderOps(Protocol[Activation]):
    """One implementation of the encoder's operations; see `definition` for each."""

    def prepare(self, matrix: Matrix, norm: Norm | None = None) -> Matrix:
        """See `definition.prepare`."""
        ...

    def stem(self, features: Tensor, conv1: Matrix, conv2: Matrix, positions: Tensor) -> Tensor:
        """See `definition.stem`."""
        ...

    def norm(self, x: Tensor, params: Norm) -> Activation:
        """See `definition.norm`."""
        ...

    def linear(self, x: Activation, matrix: Matrix) -> Tensor:
        """See `definition.linear`."""
        ...

    def linear_gelu(self, x: Activation, matrix: Matrix) -> Activation:
        """See `definition.linear_gelu`."""
        ...

    def encoder_attention(self, qkv: Tensor, n_head: int) -> Tensor:
        """See `definition.encoder_attention`."""
        ...

    def add_linear_norm(
        self, x: Tensor, y: Tensor | Activation, matrix: Matrix, shift: Tensor, params: Norm
    ) -> Activation:
        """See `definition.add_linear_norm`."""
        ...

    def add_linear_last_norm(
        self, x: Tensor, y: Tensor | Activation, matrix: Matrix, shift: Tensor, params: Norm
    ) -> Tensor:
        """See `definition.add_linear_last_norm`."""
        ...


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that one network computes with."""

    name: KernelsName
    reason: str  # why these
    reads_int8: bool  # whether the decoder's matrices may stay int8
    decoder: DecoderOps[Any]
    encoder: EncoderOps[Any]
    # See `definition.token_probability`.
    token_probability: Callable[[Tensor, Tensor, int], Tensor] = definition.token_probability
    # (matrix, first, count, frames) -> begins; see `warp`. None: the host does it, of which
    # `serve.speech.words.handovers` is the definition.
    warp: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    # (scores, tokens, frames, least) -> matrix; see `smooth`. None: plain torch does it.
    smooth: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None


def torch_only(reason: str) -> Ops:
    """Plain torch for every operation."""
    decoder: DecoderOps[Tensor] = definition
    encoder: EncoderOps[Tensor] = definition
    return Ops("torch", reason, reads_int8=False, decoder=decoder, encoder=encoder)


def choose(
    kernels: Kernels,
    device: torch.device,
    dims: Dims,
    rows: int,
    encoder_precision: EncoderPrecision = "full",
) -> Ops:
    """The operations for one engine on one device.

    Args:
        kernels: "auto" takes Triton-language kernels on a CUDA device; a name is an order.
        device: where the engine runs.
        dims: its sizes.
        rows: the most feeds of a decoder step; prompts may have more.
        encoder_precision: of the encoder's products; "fp8" is an order.

    Raises:
        UnavailableError: kernels that were asked for cannot run here.
    """
    missing = 'runtime.kernels = "torch"' if kernels == "torch" else _why_not_triton(device)
    if encoder_precision == "fp8" and (missing or not _has_bulk_copies(device)):
        raise UnavailableError(
            f'runtime.encoder_precision = "fp8" needs an NVIDIA GPU of compute capability 9.0 or '
            f'more with triton kernels; {missing or "this one is older"}; set it to "full"'
        )
    if kernels == "torch":
        return torch_only('runtime.kernels = "torch"')
    if missing is None:
        reason = f"{kernels}: {torch.cuda.get_device_name(device)}"
        return _triton(reason, device, dims, rows, encoder_precision)
    if kernels == "triton":
        raise UnavailableError(
            f'runtime.kernels = "triton" cannot run here: {missing}; '
            'set runtime.kernels = "auto" or "torch"'
        )
    return torch_only(f"auto: {missing}")


def _why_not_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device}, not CUDA"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return None


def _has_bulk_copies(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _encoder(device: torch.device, precision: EncoderPrecision) -> EncoderOps[Any]:
    if not _has_bulk_copies(device):
        return definition
    from serve.native.kernels.encoder import (  # noqa: PLC0415 - only where triton is
        Fp8Encoder,
        TritonEncoder,
    )

    if precision == "fp8":
        scaled: EncoderOps[Scaled] = Fp8Encoder(device)
        return scaled
    plain: EncoderOps[Tensor] = TritonEncoder(device)
    return plain


def _triton(
    reason: str, device: torch.device, dims: Dims, rows: int, encoder_precision: EncoderPrecision
) -> Ops:
    from serve.native.kernels.decoder import (  # noqa: PLC0415 - only where triton is
        Pending,
        TritonOps,
    )
    from serve.native.kernels.probability import (  # noqa: PLC0415 - only where triton is
        token_probability,
    )
    from serve.native.kernels.smooth import smooth  # noqa: PLC0415 - only where triton is
    from serve.native.kernels.warp import warp  # noqa: PLC0415 - only where triton is

    decoder: DecoderOps[Tensor | Pending]
    decoder = TritonOps(device, rows, dims.n_text_head, dims.n_audio_ctx)
    encoder = _encoder(device, encoder_precision)
    return Ops(
        "triton",
        reason,
        reads_int8=True,
        decoder=decoder,
        encoder=encoder,
        token_probability=token_probability,
        warp=warp,
        smooth=smooth,
    )
