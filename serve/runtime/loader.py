"""Open the runtime that an engine's manifest names."""

import dataclasses
import pkgutil

from serve.contract.config import RuntimeConfig
from serve.contract.devices import first_of
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError
from serve.contract.runtimes import RUNTIMES, SECTIONS
from serve.runtime.protocol import Runtime


def open_runtime(engine: Engine, config: RuntimeConfig, apart: bool = False) -> Runtime:
    """Start the runtime that the engine's manifest names, on the first of the configured devices.

    Args:
        engine: the engine.
        config: the runtime's configuration.
        apart: whether a runtime on a GPU runs in a separate process, if it has an `open_apart`.

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
    config = first_of(config)
    apart = apart and config.device.startswith("cuda") and bool(entry.open_apart)
    runtime: Runtime = pkgutil.resolve_name(entry.open_apart if apart else entry.open)(
        engine, config
    )
    return runtime
