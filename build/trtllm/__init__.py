"""Build engines for TensorRT-LLM: compiled ones for release 1.2, checkpoints for later releases."""
