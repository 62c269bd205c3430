"""Choose the implementation of the network's operations when an engine is loaded.

`reference_ops` is the reference implementation. `decoder` and `encoder` hold the kernels for NVIDIA
GPUs and are imported only if they are chosen.
"""

import dataclasses
import importlib.util
import platform
from collections.abc import Callable
from typing import Any

import torch

from serve.contract.config import ComputeType, EncoderPrecision, Kernels, KernelsName
from serve.contract.errors import UnavailableError
from serve.contract.manifest import Dims, Fp8Proof
from serve.native.kernels import reference_ops
from serve.native.kernels.gpu import is_hopper_or_later

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Ops:
    """The implementation of the operations for one network.

    `decoder` and `encoder` are modules or objects with the functions of `reference_ops`, which
    documents them. Between two operations of one implementation, outputs of linear layers may have
    another type than a tensor.
    """

    name: KernelsName
    reason: str  # why this implementation was chosen
    dtype: torch.dtype  # of weights and caches
    reads_int8: bool  # whether the decoder's matrices may stay int8
    int8_vocabulary: bool  # whether the vocabulary projection may stay int8
    decoder: Any
    encoder: Any
    fp8: bool = False  # whether the encoder computes products in FP8
    # See `reference_ops.token_probability`.
    token_probability: Callable[[Tensor, Tensor, int], Tensor] = reference_ops.token_probability
    # (matrix, first, count, frames) -> begins; see `warp`. None: the host computes it with
    # `serve.speech.words.monotonic_path`, the reference implementation.
    warp: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    # (scores, tokens, frames, min_divisor) -> matrix; see `smooth`. None: plain torch computes it.
    smooth: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None


_PLAIN = ("cpu", "float32")  # the device and dtype that plain torch kernels support besides CUDA


def torch_only(reason: str, dtype: torch.dtype = torch.float32) -> Ops:
    """Return the reference implementation of every operation."""
    return Ops("torch", reason, dtype, False, False, reference_ops, reference_ops)


def choose(
    kernels: Kernels,
    device: torch.device,
    dims: Dims,
    rows: int,
    encoder_precision: EncoderPrecision = "full",
    compute_type: ComputeType = "auto",
    proof: Fp8Proof | None = None,
) -> Ops:
    """Choose the operations for one engine on one device.

    Args:
        kernels: "auto" prefers Triton-language kernels on a CUDA device and oneDNN on a CPU. A
            named implementation is used or an error is raised.
        device: the device that runs the engine.
        dims: the engine's sizes.
        rows: the maximum number of tokens of a decoder step; prefill may have more.
        encoder_precision: the precision of the encoder's products; "fp8" is used or an error is
            raised.
        compute_type: the dtype of a CPU's products; a named dtype is used or an error is raised.
        proof: the FP8 accuracy check from the engine's manifest.

    Raises:
        UnavailableError: this machine cannot run a requested implementation.
    """
    name = _kernels_name(kernels, device)
    if encoder_precision == "fp8" and not runs_fp8(kernels, device):
        problem = "this one is older" if name == "triton" else f"{device} runs {name} kernels"
        raise UnavailableError(
            f'runtime.encoder_precision = "fp8" needs an NVIDIA GPU of compute capability 9.0 or '
            f'more with triton kernels; {problem}; set it to "full"'
        )
    if compute_type != "auto" and name != "onednn" and (device.type, compute_type) != _PLAIN:
        raise UnavailableError(
            f'runtime.compute_type = "{compute_type}" needs a CPU with onednn kernels; {device} '
            f'runs {name} kernels; set it to "auto"'
        )
    dtype = compute_dtype(kernels, device, compute_type)
    if name == "onednn":
        return _onednn(kernels, dtype)
    if name == "triton":
        fp8, why = takes_fp8(encoder_precision, device, proof)
        reason = f"{kernels}: {torch.cuda.get_device_name(device)}; {why}"
        return _triton(reason, device, dims, rows, fp8)
    reason = 'runtime.kernels = "torch"' if kernels == "torch" else f"auto: {_obstacle(device)}"
    return torch_only(reason, dtype)


def compute_dtype(
    kernels: Kernels, device: torch.device, compute_type: ComputeType = "auto"
) -> torch.dtype:
    """Return the dtype of the weights and of matrix products.

    Raises:
        UnavailableError: see `choose`.
    """
    if device.type == "cuda":
        return torch.float16
    has_fast_bfloat16 = _kernels_name(kernels, device) == "onednn" and has_bfloat16()
    if compute_type == "bfloat16" and not has_fast_bfloat16:
        raise UnavailableError(
            'runtime.compute_type = "bfloat16" needs a processor with AMX-BF16 or AVX512-BF16; '
            'this processor has neither; set compute_type to "auto"'
        )
    return torch.bfloat16 if has_fast_bfloat16 and compute_type != "float32" else torch.float32


def _kernels_name(kernels: Kernels, device: torch.device) -> KernelsName:
    """Return which kernels run on a device.

    Raises:
        UnavailableError: the requested kernels cannot run there.
    """
    fastest: KernelsName = "triton" if device.type == "cuda" else "onednn"
    if kernels == "torch":
        return kernels
    obstacle = _obstacle(device) if kernels in ("auto", fastest) else f"the device is {device}"
    if kernels == "auto":
        return "torch" if obstacle else fastest
    if obstacle:
        raise UnavailableError(
            f'runtime.kernels = "{kernels}" cannot run here: {obstacle}; '
            'set runtime.kernels = "auto" or "torch"'
        )
    return kernels


def _obstacle(device: torch.device) -> str | None:
    """Return the reason why the kernels for this kind of device cannot run, or None if they can."""
    if device.type != "cuda":
        if platform.machine() != "x86_64":  # oneDNN has other kernels there, which are untested
            return f"the processor is {platform.machine()}, not x86_64"
        return None if torch.backends.mkldnn.is_available() else "this torch has no oneDNN"  # type: ignore[no-untyped-call]
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
    return None


def has_bfloat16() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    return any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16")))


def _onednn(kernels: Kernels, dtype: torch.dtype) -> Ops:
    from serve.native.kernels import onednn  # noqa: PLC0415 - loads only if chosen

    ops = onednn.OneDnnOps(dtype)
    reason = f"{kernels}: {str(dtype).removeprefix('torch.')}"
    return Ops("onednn", reason, dtype, False, onednn.has_int8(), ops, ops)


def runs_fp8(kernels: Kernels, device: torch.device) -> bool:
    """Return whether the encoder can compute in FP8 on a device with these kernels."""
    return _kernels_name(kernels, device) == "triton" and is_hopper_or_later(device)


def takes_fp8(
    precision: EncoderPrecision, device: torch.device, proof: Fp8Proof | None
) -> tuple[bool, str]:
    """Return whether the encoder computes in FP8 with Triton-language kernels, and why."""
    if precision != "auto":
        return precision == "fp8", f'encoder_precision = "{precision}"'
    if not is_hopper_or_later(device):
        return False, "encoder in full precision: this GPU has no FP8"
    if proof is None:
        advice = "FP8 is not verified; run `python -m build verify`"
        return False, f"encoder in full precision: {advice}"
    used = "FP8" if proof.holds else "full precision"
    return proof.holds, (
        f"encoder in {used}: FP8 leaves {proof.agreement:.1%} of the text unchanged, "
        f"INT8 {proof.int8_agreement:.1%}"
    )


def _encoder(device: torch.device, fp8: bool) -> Any:
    if not is_hopper_or_later(device):
        return reference_ops
    from serve.native.kernels import encoder  # noqa: PLC0415 - needs triton

    return encoder.Fp8Encoder(device) if fp8 else encoder.TritonEncoder(device)


def _triton(reason: str, device: torch.device, dims: Dims, rows: int, fp8: bool) -> Ops:
    from serve.native.kernels import decoder, probability, smooth, warp  # noqa: PLC0415 - as above

    return Ops(
        "triton",
        reason,
        torch.float16,
        reads_int8=True,
        int8_vocabulary=True,
        decoder=decoder.TritonOps(device, rows, dims.n_text_head, dims.n_audio_ctx),
        encoder=_encoder(device, fp8),
        fp8=fp8,
        token_probability=probability.token_probability,
        warp=warp.warp,
        smooth=smooth.smooth,
    )
