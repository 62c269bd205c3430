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
class RuntimeEntry:
    """A runtime. Entries are `module:name`, so that only the runtime that is chosen gets loaded."""

    # (Engine, RuntimeConfig) -> Runtime
    open: str
    # Keys of [runtime] that it honours; None: all but the sections above.
    reads: tuple[str, ...] | None = None


RUNTIMES: dict[RuntimeName, RuntimeEntry] = {
    "native": RuntimeEntry("serve.native.runtime:NativeRuntime"),
    "tensorrt_llm": RuntimeEntry("serve.trtllm.executor:open_tensorrt_llm", READ_BY_ENGINES),
    "tensorrt_llm_api": RuntimeEntry("serve.trtllm.llm_api:open_llm_api", READ_BY_LLM_API),
}
