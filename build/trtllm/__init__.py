"""Engines for TensorRT-LLM."""

COMPARED_BY = "python -m eval trtllm-check"  # only the library reads its engines
