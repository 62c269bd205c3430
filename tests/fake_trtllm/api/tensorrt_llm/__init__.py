"""A stand-in for TensorRT-LLM 1.4.0: the LLM API as far as Earshot calls it."""

__version__ = "1.4.0"
