"""The device that a runtime computes on."""

import contextlib

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError


def open_device(config: RuntimeConfig) -> torch.device:
    """Return the configured device.

    Raises:
        UnavailableError: it is not there.
    """
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise UnavailableError(
            f"runtime.device = {config.device!r} is not a device; expected cpu, cuda or cuda:N"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"runtime.device = {config.device!r} is not a device that Earshot runs on; "
            "expected cpu, cuda or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"runtime.device = {config.device!r}, but this machine has "
            f'{torch.cuda.device_count()} CUDA devices; set runtime.device = "cpu"'
        )
    return device


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, of several GPUs it is this one that work goes to which names none: kernels do not."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_graphs(device: torch.device, kernels: str) -> None:
    """Refuse CUDA graphs where they cannot be had.

    The torch rules look up on the host what rows ask for, so they cannot be captured.

    Raises:
        UnavailableError: says what to set.
    """
    if device.type != "cuda" or kernels != "triton":
        raise UnavailableError(
            f"runtime.cuda_graph = true needs a CUDA device with triton kernels; the device is "
            f"{device} with {kernels} kernels; set runtime.cuda_graph = false"
        )
