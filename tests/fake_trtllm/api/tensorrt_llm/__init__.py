"""A stand-in for TensorRT-LLM 1.4.0: the LLM API as far as Earshot calls it."""

import warnings

warnings.warn("The pynvml package is deprecated", UserWarning, stacklevel=1)

__version__ = "1.4.0"
