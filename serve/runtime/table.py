"""The table of runtimes: which one executes an engine. The only module that knows them all."""

from serve.config import RuntimeConfig
from serve.engine import Engine
from serve.errors import UnavailableError
from serve.runtime.protocol import Runtime


def open_runtime(engine: Engine, config: RuntimeConfig) -> Runtime:
    """Start the runtime that the engine's manifest names.

    Raises:
        UnavailableError: the runtime or device is not usable on this machine.
    """
    name = engine.manifest.runtime
    if name == "native":
        from serve.native.runtime import NativeRuntime  # noqa: PLC0415 - load torch code only if chosen

        return NativeRuntime(engine, config)
    if name == "tensorrt_llm":
        from serve.trtllm.executor import open_tensorrt_llm  # noqa: PLC0415 - likewise

        return open_tensorrt_llm(engine, config)
    if name == "tensorrt_llm_api":
        from serve.trtllm.llm_api import open_llm_api  # noqa: PLC0415 - likewise

        return open_llm_api(engine, config)
    raise UnavailableError(f"engine {engine.path} needs the runtime {name!r}; this build has none")
