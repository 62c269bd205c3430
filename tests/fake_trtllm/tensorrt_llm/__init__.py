"""A stand-in for TensorRT-LLM 1.2.1: what Earshot calls, with the real signatures.

Whatever the real bindings would refuse (a misspelt or unknown argument, a wrong type, a missing
setting) raises here too. The network behind it is `plain_whisper`, on the CPU.
"""

__version__ = "1.2.1"
