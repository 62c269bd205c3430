"""The table of the runtimes that execute engines; no other module knows all of them.

Each runtime is a package of serve, and its entry names the function that opens it.
`build.builders` has the table of the builders that make the engines.
"""

import dataclasses
from typing import Literal

from serve.contract.tensorrt_llm import READ_BY_ENGINES, READ_BY_LLM_API, TrtllmConfig

# `runtime` of a manifest. tensorrt_llm: release 1.2; tensorrt_llm_api: release 1.3 or later
RuntimeName = Literal["native", "tensorrt_llm", "tensorrt_llm_api"]


@dataclasses.dataclass(frozen=True)
class RuntimeSections:
    """Sections of [runtime] that only one runtime reads."""

    tensorrt_llm: TrtllmConfig = TrtllmConfig()  # noqa: RUF009 - it is frozen


OWN = tuple(field.name for field in dataclasses.fields(RuntimeSections))


@dataclasses.dataclass(frozen=True)
class RuntimeEntry:
    """A runtime; `module:name` strings ensure that only the chosen runtime is imported."""

    # (Engine, RuntimeConfig) -> Runtime
    open: str
    # Keys of [runtime] that it reads; None: all except the sections above.
    reads: tuple[str, ...] | None = None


RUNTIMES: dict[RuntimeName, RuntimeEntry] = {
    "native": RuntimeEntry("serve.native.runtime:NativeRuntime"),
    "tensorrt_llm": RuntimeEntry("serve.trtllm.executor:open_tensorrt_llm", READ_BY_ENGINES),
    "tensorrt_llm_api": RuntimeEntry("serve.trtllm.llm_api:open_llm_api", READ_BY_LLM_API),
}
