"""Keys for TensorRT-LLM alone, and those that it reads besides. The home of its defaults."""

import dataclasses

from serve.contract.errors import ConfigError
from serve.contract.fields import Count, Fraction, NameOrNone, Seconds

READ_BY_ENGINES = ("device", "slots", "encoder_batch", "tensorrt_llm")
READ_BY_LLM_API = (*READ_BY_ENGINES, "cuda_graph")
"""Keys of [runtime]: another one that is not at its default is refused."""


@dataclasses.dataclass(frozen=True)
class TrtllmConfig:
    """TensorRT-LLM's own keys. Engines are built for `beam_width`; the rest is for serving."""

    # The beam_size above 1 that the engine has. More than 1: no streaming; in the LLM API no other.
    beam_width: Count = 1
    kv_cache_fraction: Fraction = 0.85  # of the GPU memory left once all is loaded
    cross_kv_fraction: Fraction = 0.75  # of that, for the encoder's output: 1500 / (1500 + 448)
    # Of engines:
    logits_processor: bool = True  # Whisper's rules by a callback on every step; else by a bias
    no_speech_probe: bool = False  # a second encoder pass per window for no-speech probability
    # Of the LLM API, which has a process of its own:
    python: NameOrNone = ""  # of the environment with the library; empty: the server's own
    start_timeout_s: Seconds = 600.0  # until it has loaded the checkpoint


OF_ENGINES = ("logits_processor", "no_speech_probe")
OF_LLM_API = ("python", "start_timeout_s")


def require_unset(config: TrtllmConfig, keys: tuple[str, ...], why: str) -> None:
    """Refuse keys that would be passed over.

    Raises:
        ConfigError: one of them is not at its default; names it and says why it cannot be.
    """
    for key in keys:
        value, default = getattr(config, key), getattr(TrtllmConfig, key)
        if value != default:
            raise ConfigError(
                f"runtime.tensorrt_llm.{key} = {value!r}, but {why}; expected {default!r}"
            )
