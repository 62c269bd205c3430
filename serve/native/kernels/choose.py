"""The operations that the network is made of, each chosen once, when an engine is loaded.

`definition` says what each must compute; `decoder` and `encoder` hold the kernels for NVIDIA GPUs
and are imported only where they are chosen.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

from serve.config import EncoderPrecision, Kernels
from serve.engine import Dims
from serve.errors import UnavailableError
from serve.native.kernels import definition
from serve.native.kernels.definition import CrossKV, Matrix, Norm

Tensor = torch.Tensor
Flow = Any
"""What one operation hands to the next and nobody else looks into; plain torch: a tensor."""


class EncoderOps(Protocol):
    """One implementation of the encoder's operations; see `definition`."""

    def prepare(self, matrix: Matrix) -> Matrix:
        """See `definition.prepare`."""
        ...

    def stem(self, features: Tensor, conv1: Matrix, conv2: Matrix, positions: Tensor) -> Tensor:
        """See `definition.stem`."""
        ...

    def norm(self, x: Tensor, params: Norm) -> Flow:
        """See `definition.norm`."""
        ...

    def linear(self, x: Flow, matrix: Matrix) -> Tensor:
        """See `definition.linear`."""
        ...

    def linear_gelu(self, x: Flow, matrix: Matrix) -> Flow:
        """See `definition.linear_gelu`."""
        ...

    def add_linear_norm(
        self, x: Tensor, y: Flow, matrix: Matrix, shift: Tensor, params: Norm, last: bool
    ) -> Flow:
        """See `definition.add_linear_norm`."""
        ...


@dataclasses.dataclass(frozen=True)
class Ops:
    """One implementation of each operation; see the function of the same name in `definition`."""

    name: str  # "torch" or "triton"
    reason: str  # why these
    reads_int8: bool  # whether matrices may stay int8
    embed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    norm_linear: Callable[[Flow, Norm, Matrix], Flow]
    norm_linear_gelu: Callable[[Flow, Norm, Matrix], Flow]
    linear_residual: Callable[[Flow, Matrix, Flow], Flow]
    logits: Callable[[Flow, Norm, Matrix], Tensor]
    self_attention: Callable[[Flow, Tensor, Tensor, Tensor, int], Flow]
    cross_attention: Callable[[Flow, CrossKV], Flow]
    store_cross: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    encoder: EncoderOps


def torch_only(reason: str) -> Ops:
    """Plain torch for every operation."""
    return Ops(
        name="torch",
        reason=reason,
        reads_int8=False,
        embed=definition.embed,
        norm_linear=definition.norm_linear,
        norm_linear_gelu=definition.norm_linear_gelu,
        linear_residual=definition.linear_residual,
        logits=definition.logits,
        self_attention=definition.self_attention,
        cross_attention=definition.cross_attention,
        store_cross=definition.store_cross,
        encoder=definition,
    )


def choose(
    kernels: Kernels,
    device: torch.device,
    dims: Dims,
    slots: int,
    encoder_precision: EncoderPrecision = "full",
) -> Ops:
    """The operations for one engine on one device.

    Args:
        kernels: "auto" takes Triton-language kernels on a CUDA device; a name is an order.
        device: where the engine runs.
        dims: its sizes.
        slots: the most decoder rows of a step.
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
        return _triton(reason, device, dims, slots, encoder_precision)
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


def _encoder(device: torch.device, precision: EncoderPrecision) -> EncoderOps:
    if not _has_bulk_copies(device):
        return definition
    from serve.native.kernels.encoder import (  # noqa: PLC0415 - only where triton is
        Fp8Encoder,
        TritonEncoder,
    )

    return Fp8Encoder(device) if precision == "fp8" else TritonEncoder(device)


def _triton(
    reason: str, device: torch.device, dims: Dims, slots: int, encoder_precision: EncoderPrecision
) -> Ops:
    from serve.native.kernels.decoder import TritonOps  # noqa: PLC0415 - only where triton is

    kernels = TritonOps(device, slots, dims.n_text_head, dims.n_audio_ctx)
    return Ops(
        name="triton",
        reason=reason,
        reads_int8=True,
        embed=kernels.embed,
        norm_linear=kernels.norm_linear,
        norm_linear_gelu=kernels.norm_linear_gelu,
        linear_residual=kernels.linear_residual,
        logits=kernels.logits,
        self_attention=kernels.self_attention,
        cross_attention=kernels.cross_attention,
        store_cross=kernels.store_cross,
        encoder=_encoder(device, encoder_precision),
    )
