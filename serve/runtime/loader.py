"""Open the runtime that an engine's manifest names."""

import dataclasses
import pkgutil

from serve.contract.config import RuntimeConfig
from serve.contract.devices import first_of
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError
from serve.contract.runtimes import RUNTIMES, SECTIONS
from serve.runtime.protocol import Runtime


def open_runtime(engine: Engine, config: RuntimeConfig) -> Runtime:
    """Start the runtime that the engine's manifest names, on the first of the configured devices.

    Raises:
        ConfigError: the configuration sets an option that the runtime would ignore.
        UnavailableError: this machine cannot use the runtime or the device.
    """
    name = engine.manifest.runtime
    entry = RUNTIMES[name]
    for field in dataclasses.fields(RuntimeConfig):
        value = getattr(config, field.name)
        reads = field.name not in SECTIONS if entry.reads is None else field.name in entry.reads
        if not reads and value != field.default:
            shown = "" if dataclasses.is_dataclass(value) else f" = {value!r}"
            raise ConfigError(
                f"runtime.{field.name}{shown} is set, but {engine.path} is for the runtime "
                f"{name!r}, which does not have it; leave it out"
            )
    runtime: Runtime = pkgutil.resolve_name(entry.open)(engine, first_of(config))
    return runtime
