"""Check, before opening it, whether an engine may replace the one of a running server."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from serve.contract.config import Config
from serve.contract.errors import ConfigError, EngineError, UnavailableError, shown
from serve.contract.manifest import Manifest, read_manifest
from serve.supervisor.control import ReloadRequest
from serve.supervisor.processes import free_memory_bytes
from serve.supervisor.server import TritonServer

_MIB = 2**20
_EXCHANGED = ("engine", "server.open")  # the latter is what --open sets


def check_reload(asked: Config, order: ReloadRequest, engine: Path) -> None:
    """Check that a reload changes only the network.

    Args:
        asked: the config that the server was started with.
        order: the reload request.
        engine: the folder of the present engine.

    Raises:
        ConfigError: the config has changed; the message names the first key.
        EngineError: the new engine's manifest cannot be read, or has other tokens.
    """
    for key, old, new in _differences(asked, order.config):
        raise ConfigError(
            f"{key} is {shown(new)} in the config and {shown(old)} in the server that runs; only "
            "the engine is exchanged while it runs, so restart it"
        )
    old_facts, new_facts = (_tokens(read_manifest(path)) for path in (engine, Path(order.engine)))
    for key, old in old_facts.items():
        if new_facts[key] != old:
            raise EngineError(
                f"its {key} is {shown(new_facts[key])}, and {shown(old)} in the engine that runs; "
                "a server with other tokens is another product: restart it"
            )


def require_memory(running: Iterable[object]) -> None:
    """Check that memory has room for new engines beside the running ones.

    Raises:
        UnavailableError: there is too little memory.
    """
    taken = sum(it.memory_bytes() for it in running if isinstance(it, TritonServer)) // _MIB
    free = free_memory_bytes() // _MIB
    if free < taken:
        raise UnavailableError(
            f"{free} MiB of memory are free, and the engine that runs has {taken}; free some, or "
            "exchange it with --in-place, which ends the old one first while requests wait"
        )


def _differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ between two configs, with both values."""
    for field in dataclasses.fields(Config if not at else old):
        key = f"{at}{field.name}"
        if key in _EXCHANGED:
            continue
        values = getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(values[0]):
            yield from _differences(*values, f"{key}.")
        elif values[0] != values[1]:
            yield key, *values


def _tokens(manifest: Manifest) -> dict[str, Any]:
    """Return the facts of an engine's tokens that clients and live drafts rely on."""
    facts = dataclasses.asdict(manifest.tokenizer)
    del facts["alignment_heads"]
    return {"dims.n_vocab": manifest.dims.n_vocab} | {
        f"tokenizer.{name}": value for name, value in facts.items()
    }
