"""The table of runtimes: what executes an engine. The only module that knows them all.

A runtime is a folder of serve; a row here names what the rest finds in it. Of the builders, which
make its engines, `build.builders` has the table.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from serve.contract.tensorrt_llm import READ_BY_ENGINES, READ_BY_LLM_API, TrtllmConfig

# A manifest's `runtime`. tensorrt_llm: of release 1.2; tensorrt_llm_api: of 1.3 or later
RuntimeName = Literal["native", "tensorrt_llm", "tensorrt_llm_api"]


@dataclasses.dataclass(frozen=True)
class RuntimeSections:
    """Sections of [runtime] that one runtime alone reads."""

    tensorrt_llm: TrtllmConfig = TrtllmConfig()  # noqa: RUF009 - it is frozen


OWN = tuple(field.name for field in dataclasses.fields(RuntimeSections))


Infer = Callable[[Mapping[str, Any], list[str]], Mapping[str, Any]]
"""Calls the model with arrays and the names of the outputs wanted; raises an EarshotError."""


@dataclasses.dataclass(frozen=True)
class TritonModel:
    """A model of Triton's that decodes, beside those that clients call."""

    name: str
    template: Path  # its config.pbtxt with $-names
    values: Mapping[str, Any]  # of these names


@dataclasses.dataclass(frozen=True)
class Row:
    """A runtime. Entries are `module:name`, so that only the runtime that is chosen gets loaded."""

    # (Engine, RuntimeConfig) -> Runtime
    open: str
    # Keys of [runtime] that it honours; None: all but the sections above.
    reads: tuple[str, ...] | None = None
    # (engine's folder, RuntimeConfig) -> TritonModel | None, without torch: a model of Triton's
    # that decodes in place of the runtime, if the config asks for it.
    triton_model: str = ""
    # (Engine, RuntimeConfig, Infer) -> Runtime: one that has the work done by that model.
    open_behind: str = ""


RUNTIMES: dict[RuntimeName, Row] = {
    "native": Row("serve.native.runtime:NativeRuntime"),
    "tensorrt_llm": Row(
        "serve.trtllm.executor:open_tensorrt_llm",
        READ_BY_ENGINES,
        "serve.trtllm.triton_model:triton_model",
        "serve.trtllm.backend:open_backend",
    ),
    "tensorrt_llm_api": Row("serve.trtllm.llm_api:open_llm_api", READ_BY_LLM_API),
}
