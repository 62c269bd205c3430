"""The best that a machine can do: measured ceilings, and the least work of a window.

The floor of a workload is its least arithmetic and its least bytes at the measured ceilings, one
after the other: arithmetic limits the encoder, memory the decoder. Running both at the same time
could be faster than the floor.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import benchmark

from eval.bench.table import Measurement
from serve.contract.config import CrossPrecision, Precision, RuntimeConfig
from serve.contract.manifest import HEAD_DIM, Dims, Manifest
from serve.native.kernels.choose import compute_dtype

PROMPT_TOKENS = 4  # start, language, task, no timestamps
ATTENTION_WINDOWS = 8
_WARM_CALLS, _CALLS = 3, 20
_FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates that this machine reached without other work."""

    product: float  # FLOP/s of a big matrix product: FP16 on a GPU, the compute type on a CPU
    fp8_product: float | None  # the same in FP8; None: the device has no FP8
    attention: float  # FLOP/s of the encoder's attention
    memory: float  # bytes/s of a big copy, read and written

    def measurements(self) -> Iterator[Measurement]:
        """Yield the table's rows."""
        for name, rate, unit in (
            ("matrix product", self.product, "TFLOP/s"),
            ("FP8 product", self.fp8_product, "TFLOP/s"),
            ("attention", self.attention, "TFLOP/s"),
            ("copy, read + write", self.memory, "TB/s"),
        ):
            if rate is not None:
                yield Measurement("ceiling", name, rate / 1e12, unit)


def measure_ceilings(config: RuntimeConfig, dims: Dims) -> Ceilings:
    """Measure the configured device, with sizes that fill a GPU, and small ones on a CPU.

    Raises:
        UnavailableError: it cannot compute as configured.
    """
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    side, floats = (8192, 2**29) if on_gpu else (512, 2**20)
    dtype = compute_dtype(config.kernels, device, config.compute_type)
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        has_fp8 = on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)
        source = torch.randn(floats, device=device)
        target = torch.empty_like(source)
        return Ceilings(
            product=2 * side**3 / mean_seconds(lambda: a @ b),
            fp8_product=2 * side**3 / mean_seconds(_fp8_product(a, b)) if has_fp8 else None,
            attention=_attention(device, dims, dtype),
            memory=2 * source.nbytes / mean_seconds(lambda: target.copy_(source)),
        )


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a product with one scale for each side and fast accumulation, the fastest kind."""
    scale = torch.ones((), device=a.device)
    a_fp8, b_fp8 = a.to(_FP8), b.to(_FP8).t()
    return lambda: torch._scaled_mm(
        a_fp8, b_fp8, scale_a=scale, scale_b=scale, out_dtype=torch.float16, use_fast_accum=True
    )


def _attention(device: torch.device, dims: Dims, dtype: torch.dtype) -> float:
    """Measure FLOP/s of attention over 8 windows, by cuDNN if it supports them."""
    windows = ATTENTION_WINDOWS if device.type == "cuda" else 1
    shape = (windows, dims.n_audio_head, dims.n_audio_ctx, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True), torch.inference_mode():
        seconds = mean_seconds(lambda: F.scaled_dot_product_attention(q, k, v))
    return 4 * windows * dims.n_audio_head * dims.n_audio_ctx**2 * HEAD_DIM / seconds


def mean_seconds(work: Callable[[], object]) -> float:
    """Return the mean time of a call on the current device, after a warm-up."""
    threads = torch.get_num_threads()
    timer = benchmark.Timer("work()", globals={"work": work}, num_threads=threads)
    timer.timeit(_WARM_CALLS)
    return timer.timeit(_CALLS).mean


def encoder_work(dims: Dims) -> tuple[float, float, float]:
    """Count the least operations to encode one window and project its cross keys and values.

    Returns:
        the products of the layers' matrices, which may be FP8; attention; convolutions with the
        cross keys and values.
    """
    d, ffn, frames = dims.n_audio_state, dims.n_audio_ffn, dims.n_audio_ctx
    products = dims.n_audio_layer * 2 * frames * (4 * d * d + 2 * d * ffn)
    attention = dims.n_audio_layer * 4 * frames * frames * d
    stem = 2 * frames * 3 * d * (2 * dims.n_mels + d)
    return products, attention, stem + dims.n_text_layer * 2 * 2 * frames * d * d


def step_bytes(
    dims: Dims, precision: Precision, cross_kv: CrossPrecision, slots: int, age: float
) -> float:
    """Count the least bytes of a decoder step: its weights and every slot's keys and values, once.

    Args:
        dims: the network's sizes.
        precision: the precision of the decoder's matrices. The cross-attention projections are
            not counted: they run once for each window.
        cross_kv: precision of cross-attention keys and values; self-attention's are FP16.
        slots: the number of decoding slots.
        age: the number of tokens in each slot.
    """
    d, layers = dims.n_text_state, dims.n_text_layer
    weights = layers * (6 * d * d + 2 * d * dims.n_text_ffn) + dims.n_vocab * d
    cross = (1 if cross_kv == "int8" else 2) * dims.n_audio_ctx
    keys = layers * 2 * d * (cross + 2 * age)
    return (1 if precision == "int8" else 2) * weights + slots * keys


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least time that windows can take with an engine and a configuration."""

    manifest: Manifest
    config: RuntimeConfig
    ceilings: Ceilings
    fp8: bool = False  # whether the encoder computes in FP8

    @property
    def encode_s(self) -> float:
        """Return the seconds that encoding one window takes."""
        products, attention, rest = encoder_work(self.manifest.dims)
        ceilings = self.ceilings
        product_rate = (self.fp8 and ceilings.fp8_product) or ceilings.product
        attention_s, rest_s = attention / ceilings.attention, rest / ceilings.product
        return products / product_rate + attention_s + rest_s

    def window_s(self, tokens: int, slots: int) -> float:
        """Return the seconds of a window while `slots` slots decode; 1 is a single request."""
        steps = PROMPT_TOKENS + tokens - 1  # the last token is not fed
        dims, precision = self.manifest.dims, self.manifest.precision
        size = step_bytes(dims, precision, self.config.cross_kv, slots, (steps + 1) / 2)
        return self.encode_s + steps * size / self.ceilings.memory / slots
