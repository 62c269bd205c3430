"""The configuration of TensorRT-LLM, and the keys of [runtime] that it reads."""

import dataclasses

from serve.contract.fields import Count, Fraction, NameOrNone

READ_BY_ENGINES = ("device", "slots", "encoder_batch", "tensorrt_llm")
READ_BY_LLM_API = (*READ_BY_ENGINES, "cuda_graph")
"""Keys of [runtime] that a runtime reads; it rejects other keys that are not at their default."""


@dataclasses.dataclass(frozen=True)
class TrtllmConfig:
    """Keys of TensorRT-LLM. Engines are built for `beam_width`; the others are for serving."""

    # Beam size that the engine is built for; above 1 there is no streaming.
    beam_width: Count = 1
    # Fraction of the remaining GPU memory for the KV cache, after the weights are loaded.
    kv_cache_fraction: Fraction = 0.85
    # Python interpreter of the environment that has the LLM API; empty: the server's own.
    python: NameOrNone = ""
