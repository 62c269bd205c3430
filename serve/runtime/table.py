"""The table of runtimes: which one executes an engine. The only module that knows them all."""

import pkgutil
from collections.abc import Callable

from serve.config import RuntimeConfig, RuntimeName
from serve.engine import Engine
from serve.runtime.protocol import Runtime

# By name, as `module:callable`, so that only the runtime that is chosen gets loaded.
OPENERS: dict[RuntimeName, str] = {
    "native": "serve.native.runtime:NativeRuntime",
    "tensorrt_llm": "serve.trtllm.executor:open_tensorrt_llm",
    "tensorrt_llm_api": "serve.trtllm.llm_api:open_llm_api",
}


def open_runtime(engine: Engine, config: RuntimeConfig) -> Runtime:
    """Start the runtime that the engine's manifest names.

    Raises:
        UnavailableError: the runtime or device is not usable on this machine.
    """
    start: Callable[[Engine, RuntimeConfig], Runtime]
    start = pkgutil.resolve_name(OPENERS[engine.manifest.runtime])
    return start(engine, config)
