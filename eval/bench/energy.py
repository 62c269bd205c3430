"""The energy that a GPU takes from the wall, as its driver counts it."""

import torch

try:
    import pynvml
except ImportError:  # the rest of the bench needs it as little
    pynvml = None


def joules_so_far(device: str) -> float | None:
    """Read the J that a GPU has used since its driver was loaded; None where NVML does not tell."""
    if pynvml is None or torch.device(device).type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except pynvml.NVMLError:  # older than Volta, or a container without the library
        return None
