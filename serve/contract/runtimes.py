"""The table of the runtimes that execute engines; no other module knows all of them.

Each runtime is a package of serve, and its entry names the function that opens it.
`build.builders` has the table of the builders that make the engines.
"""

import dataclasses
from typing import Literal

from serve.contract.fields import Count, Fraction, NameOrNone

# `runtime` of a manifest. tensorrt_llm: release 1.2; tensorrt_llm_api: release 1.3 or later
RuntimeName = Literal["native", "tensorrt_llm", "tensorrt_llm_api"]
READ_BY_ENGINES = ("device", "slots", "encoder_batch", "tensorrt_llm")
READ_BY_LLM_API = (*READ_BY_ENGINES, "cuda_graph", "compute_type")
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


@dataclasses.dataclass(frozen=True)
class RuntimeSections:
    """Sections of [runtime] that only one runtime reads."""

    tensorrt_llm: TrtllmConfig = TrtllmConfig()


SECTIONS = tuple(field.name for field in dataclasses.fields(RuntimeSections))


@dataclasses.dataclass(frozen=True)
class RuntimeEntry:
    """A runtime; `module:name` strings ensure that only the chosen runtime is imported."""

    # (Engine, RuntimeConfig) -> Runtime
    open: str
    # Keys of [runtime] that it reads; None: all except the sections above.
    reads: tuple[str, ...] | None = None


RUNTIMES: dict[RuntimeName, RuntimeEntry] = {
    "native": RuntimeEntry("serve.native.process:open_native"),
    "tensorrt_llm": RuntimeEntry("serve.trtllm.executor:open_tensorrt_llm", READ_BY_ENGINES),
    "tensorrt_llm_api": RuntimeEntry("serve.trtllm.llm_api:open_llm_api", READ_BY_LLM_API),
}
