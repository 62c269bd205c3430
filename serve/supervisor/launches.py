"""Prepare each Triton of a run: its folder, config and engine."""

import dataclasses
from pathlib import Path

from serve.contract.config import Config
from serve.contract.fields import MAX_BEAMS
from serve.supervisor.server import TritonLaunch, prepare
from serve.wire.folder import reference_folder

_REFERENCE_SLOTS = 4  # it has one request at a time, with few windows


def prepare_reference(folder: Path, config: Config) -> TritonLaunch | None:
    """Prepare the Triton of the shadow monitor's reference; None if it has no engine of its own.

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
        # In full precision, and without options that only a GPU has.
        kernels="auto",
        compute_type="float32" if shadow.device == "cpu" else "auto",
        cuda_graph=runtime.cuda_graph and shadow.device.startswith("cuda"),
        cross_kv="full",
        encoder_precision="full",
    )
    live = dataclasses.replace(config.live, short_encoder="auto")
    config = dataclasses.replace(config, runtime=runtime, live=live)
    return prepare(own, config, shadow.engine)


def from_here(config: Config) -> Config:
    """Return the config with absolute paths."""

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
    )
