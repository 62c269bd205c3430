"""A stand-in for TensorRT-LLM 1.2.1: what Earshot calls, with the real signatures.

Whatever the real bindings would refuse (a misspelt or unknown argument, a wrong type, a missing
setting) raises here too. The network behind it is `plain_whisper`, on the CPU.
"""

import warnings

# The real one does so as it is imported in NVIDIA's image.
warnings.warn("The pynvml package is deprecated", UserWarning, stacklevel=1)

__version__ = "1.2.1"
