"""Open the runtime that an engine's manifest names."""

import dataclasses
import pkgutil
from typing import Any

from serve.contract.config import RuntimeConfig
from serve.contract.devices import first_of
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError
from serve.contract.runtimes import OWN, RUNTIMES, RuntimeEntry
from serve.runtime.protocol import Runtime


def open_runtime(engine: Engine, config: RuntimeConfig) -> Runtime:
    """Start the runtime that the engine's manifest names, on the first of the configured devices.

    Raises:
        ConfigError: the configuration sets an option that the runtime would ignore.
        UnavailableError: this machine cannot use the runtime or the device.
    """
    runtime: Runtime = pkgutil.resolve_name(_row_of(engine, config).open)(engine, first_of(config))
    return runtime


def _row_of(engine: Engine, config: RuntimeConfig) -> RuntimeEntry:
    """Return the entry of the engine's runtime, if it supports all options of the config."""
    name = engine.manifest.runtime
    row = RUNTIMES[name]
    for field in dataclasses.fields(RuntimeConfig):
        value = getattr(config, field.name)
        read = field.name not in OWN if row.reads is None else field.name in row.reads
        if not read and value != field.default:
            raise ConfigError(
                f"{_setting(field.name, value, field.default)}, but {engine.path} is for the "
                f"runtime {name!r}, which does not have it; leave it out"
            )
    return row


def _setting(key: str, value: Any, default: Any) -> str:
    """Return a key and its value as in the file; for a section, its first key that is set."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if inner != getattr(default, field.name):
                return _setting(f"{key}.{field.name}", inner, None)
    return f"runtime.{key} = {value!r}"
