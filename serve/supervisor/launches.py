"""What each Triton of a run is started with: its folder, its configuration, its engine."""

import dataclasses
from pathlib import Path

from serve.contract.config import Config
from serve.contract.devices import places_of
from serve.contract.fields import MAX_BEAMS
from serve.supervisor.server import TritonLaunch, config_to_toml, prepare
from serve.wire.folder import CONFIG, engine_folders, reference_folder

_REFERENCE_SLOTS = 4  # it has one request at a time, of a few windows perhaps


def prepare_engines(folder: Path, config: Config, engine: str) -> dict[str, TritonLaunch]:
    """Write what the gateway and each engine read; return the engines' launches by device.

    Raises:
        EarshotError: see `prepare`.
    """
    places = places_of(config.runtime)
    (folder / CONFIG).write_text(config_to_toml(config), encoding="utf-8")
    launches = {}
    for place, own in zip(places, engine_folders(folder, len(places)), strict=True):
        own.mkdir(mode=0o700, exist_ok=True)
        of_place = dataclasses.replace(config, runtime=place.runtime)
        launches[place.name] = prepare(own, of_place, engine, place.environment, len(places))
    return launches


def prepare_reference(folder: Path, config: Config) -> TritonLaunch | None:
    """Write what the shadow monitor's reference reads; None where it is no engine of its own.

    Raises:
        EarshotError: see `prepare`.
    """
    shadow, runtime = config.shadow, config.runtime
    if not shadow.opens_engine:
        return None
    own = reference_folder(folder)
    own.mkdir(mode=0o700)
    runtime = dataclasses.replace(
        runtime,
        device=shadow.device,
        memory_share=shadow.memory_share,
        slots=_REFERENCE_SLOTS,
        rows=_REFERENCE_SLOTS * MAX_BEAMS,
        encoder_batch=1,
        draft_tokens=0,
        # In full, and nothing that a GPU alone has.
        kernels="auto",
        cuda_graph=runtime.cuda_graph and shadow.device.startswith("cuda"),
        cross_kv="full",
        encoder_precision="full",
    )
    live = dataclasses.replace(config.live, short_encoder=False)
    config = dataclasses.replace(config, runtime=runtime, live=live)
    return prepare(own, config, shadow.engine)


def from_here(config: Config) -> Config:
    """Return the same, with absolute paths of files."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if path else ""

    return dataclasses.replace(
        config,
        server=dataclasses.replace(
            config.server,
            keys_file=absolute(config.server.keys_file),
            usage_file=absolute(config.server.usage_file),
            tls_certificate=absolute(config.server.tls_certificate),
            tls_key=absolute(config.server.tls_key),
        ),
        upstreams=tuple(
            dataclasses.replace(
                upstream,
                key_file=absolute(upstream.key_file),
                tls_roots=absolute(upstream.tls_roots),
            )
            for upstream in config.upstreams
        ),
    )
