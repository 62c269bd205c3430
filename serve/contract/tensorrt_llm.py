"""Keys for TensorRT-LLM alone, and those that it reads besides. The home of its defaults."""

import dataclasses

from serve.contract.fields import Count, Fraction, NameOrNone

READ_BY_ENGINES = ("device", "slots", "encoder_batch", "tensorrt_llm")
READ_BY_LLM_API = (*READ_BY_ENGINES, "cuda_graph")
"""Keys of [runtime]: another one that is not at its default is refused."""


@dataclasses.dataclass(frozen=True)
class TrtllmConfig:
    """TensorRT-LLM's own keys. Engines are built for `beam_width`; the rest is for serving."""

    # The `beam_size` above 1 that the engine has; with more than 1 there is no streaming.
    beam_width: Count = 1
    # Share for the KV cache of the GPU memory that is left once all is loaded.
    kv_cache_fraction: Fraction = 0.85
    # Interpreter of the environment with the LLM API; empty: the server's own.
    python: NameOrNone = ""
