"""What a config says to TensorRT-LLM alone, and what it reads besides. The home of its defaults."""

import dataclasses

from serve.fields import Count, Fraction

READ_BY_ENGINES = ("device", "slots", "encoder_batch", "tensorrt_llm")
READ_BY_LLM_API = (*READ_BY_ENGINES, "cuda_graph")
"""Keys of [runtime]: another one that is not at its default is refused."""


@dataclasses.dataclass(frozen=True)
class TrtllmConfig:
    """What only TensorRT-LLM knows. Engines are built for `beam_width`; the rest is for serving.

    The LLM API has the first three; the rest is for engines.
    """

    # The beam_size above 1 that the engine has. More than 1: no streaming; in the LLM API no other.
    beam_width: Count = 1
    kv_cache_fraction: Fraction = 0.85  # of the GPU memory left once the engines are loaded
    cross_kv_fraction: Fraction = 0.75  # of that, for the encoder's output: 1500 / (1500 + 448)
    logits_processor: bool = True  # Whisper's rules by a callback on every step; else by a bias
    no_speech_probe: bool = False  # a second encoder pass per window for no-speech probability
    triton_backend: bool = False  # serve by Triton's C++ model; without timestamps, see README
