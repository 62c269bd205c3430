"""Our own runtime: the network in PyTorch and kernels, its slots, its CUDA graphs."""
