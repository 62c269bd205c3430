"""The table of runtimes: what executes an engine. The only module that knows them all.

A runtime is a folder of serve; a row here names what the rest finds in it. Of the builders, which
make its engines, `build.builders` has the table.
"""

import dataclasses
from typing import Literal

from serve.contract.tensorrt_llm import READ_BY_ENGINES, READ_BY_LLM_API, TrtllmConfig

# A manifest's `runtime`. tensorrt_llm: of release 1.2; tensorrt_llm_api: of 1.3 or later
RuntimeName = Literal["native", "tensorrt_llm", "tensorrt_llm_api"]


@dataclasses.dataclass(frozen=True)
class RuntimeSections:
    """Sections of [runtime] that one runtime alone reads."""

    tensorrt_llm: TrtllmConfig = TrtllmConfig()  # noqa: RUF009 - it is frozen


OWN = tuple(field.name for field in dataclasses.fields(RuntimeSections))


@dataclasses.dataclass(frozen=True)
class Row:
    """A runtime. Entries are `module:name`, so that only the runtime that is chosen gets loaded."""

    # (Engine, RuntimeConfig) -> Runtime
    open: str
    # Keys of [runtime] that it honours; None: all but the sections above.
    reads: tuple[str, ...] | None = None


RUNTIMES: dict[RuntimeName, Row] = {
    "native": Row("serve.native.runtime:NativeRuntime"),
    "tensorrt_llm": Row("serve.trtllm.executor:open_tensorrt_llm", READ_BY_ENGINES),
    "tensorrt_llm_api": Row("serve.trtllm.llm_api:open_llm_api", READ_BY_LLM_API),
}

REMOVED_KEYS = {
    "runtime.tensorrt_llm.triton_backend": "chose NVIDIA's C++ Triton model in place of the "
    "executor; leave the key out, for the executor serves every engine of TensorRT-LLM 1.2",
    "runtime.tensorrt_llm.cross_kv_fraction": "was the encoder's share of the cache; leave it "
    "out, it is what Whisper's sizes need, 0.75",
    "runtime.tensorrt_llm.logits_processor": "chose a constant bias in place of Whisper's rules; "
    "leave it out, the rules hold at every step",
    "runtime.tensorrt_llm.no_speech_probe": "asked for a second encoder pass a window; leave it "
    "out, the probability of no speech is told where the language is detected",
    "runtime.tensorrt_llm.start_timeout_s": "bounded the library's start; leave it out, the limit "
    "is 600 s, and server.start_timeout_s that of the whole server",
}
"""Keys of [runtime] that earlier versions had: what each one was, and what to do now."""
