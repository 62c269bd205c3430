"""The device that a runtime computes on."""

import contextlib

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError


def open_device(config: RuntimeConfig) -> torch.device:
    """Return the configured device.

    Raises:
        UnavailableError: the device is not supported or does not exist.
    """
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise UnavailableError(
            f"runtime.device = {config.device!r} is not a device; expected cpu, cuda or cuda:N"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"runtime.device = {config.device!r} is not supported; expected cpu, cuda or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"runtime.device = {config.device!r}, but this machine has "
            f'{torch.cuda.device_count()} CUDA devices; set runtime.device = "cpu"'
        )
    return device


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one inside the context: kernel launches do not name a device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_graphs(device: torch.device, kernels: str) -> None:
    """Check that a device and its kernels support CUDA graphs.

    The token rules in torch read the rows' options on the host, so graphs cannot capture them.

    Raises:
        UnavailableError: they do not; the message names the key to set.
    """
    if device.type != "cuda" or kernels != "triton":
        raise UnavailableError(
            f"runtime.cuda_graph = true needs a CUDA device with triton kernels; the device is "
            f"{device} with {kernels} kernels; set runtime.cuda_graph = false"
        )
