"""The network's operations: their definition in plain torch, and kernels for NVIDIA GPUs."""
