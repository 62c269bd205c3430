"""The generation of a GPU."""

import torch


def is_hopper_or_later(device: torch.device) -> bool:
    """Return whether a device has FP8, bulk copies (TMA), and launches that overlap."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
