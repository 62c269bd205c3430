"""Build engines for TensorRT-LLM: compiled ones for release 1.2, checkpoints for later releases."""

COMPARED_BY = "python -m eval trtllm-check"  # only the library can read its engines
