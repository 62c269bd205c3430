"""The generation of a GPU, and copies to it."""

import torch


def is_hopper_or_later(device: torch.device) -> bool:
    """Return whether a device has FP8, bulk copies (TMA), and launches that overlap."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor, for a GPU in pinned memory, so that a copy to it need not wait."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
