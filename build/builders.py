"""The interface of every runtime's builder, the table of builders, and what they have in common.

A builder is a module. It writes its own files into a folder; that the folder appears whole or not
at all, the tokenizer, the manifest and the comparison with the checkpoint are the same for all.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from build import native
from build.checkpoint import Checkpoint
from build.config import BuildProduct
from build.draft import draft_facts
from build.trtllm import engines, llm_api
from build.writer import (
    BuiltEngineFacts,
    Log,
    disk_errors,
    manifest_of,
    read_confidence,
    staged,
    write_manifest,
)
from serve.contract.engine import (
    MEL_FILTERS_FILE,
    TOKENIZER_FILE,
    Dims,
    Engine,
    Manifest,
    TokenizerFacts,
    open_engine,
    write_mel_filters,
)
from serve.contract.errors import ConfigError, EngineError
from serve.contract.runtimes import RuntimeName


class EngineBuilder(Protocol):
    """Builds engines for one runtime."""

    VERIFIES: bool
    """True where `build.verify` can compare its engines with their checkpoint."""
    COMPARED_BY: str
    """The command that compares them, as one types it."""
    DRAFTS: bool
    """True where its engines can hold a draft, a second decoder."""
    CALIBRATES: bool
    """True where it compensates rounding errors on calibration clips."""

    def check(self, config: BuildProduct) -> None:
        """Refuse a config that this builder cannot honour, before a checkpoint is opened.

        Raises:
            ConfigError: names the key, its value and what to do.
        """
        ...

    def commands(self, dims: Dims, config: BuildProduct) -> list[list[str]]:
        """Return the commands that a build runs, if any; needs neither library nor GPU."""
        ...

    def fill(
        self, folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log
    ) -> BuiltEngineFacts:
        """Write this runtime's files into an engine folder that holds tokenizer and filters.

        Raises:
            UnavailableError: this machine lacks what the build needs.
            CheckpointError: the checkpoint is not what the runtime can execute.
            EngineError: a command or the disk failed.
        """
        ...

    def is_current(self, engine: Engine, checkpoint: Checkpoint, config: BuildProduct) -> bool:
        """Return whether an engine of this checkpoint and precision is what `fill` would write now.

        Raises:
            UnavailableError, CheckpointError: a build would be refused.
        """
        ...


# The table: with that of serve.contract.runtimes all that knows them by name.
_BUILDERS: dict[RuntimeName, EngineBuilder] = {
    "native": native,
    "tensorrt_llm": engines,
    "tensorrt_llm_api": llm_api,
}


def builder_for(runtime: RuntimeName) -> EngineBuilder:
    """Return the builder of a runtime's engines."""
    return _BUILDERS[runtime]


def builder_of(config: BuildProduct) -> EngineBuilder:
    """Return the builder that `build.runtime` names."""
    return builder_for(config.build.runtime)


def check(config: BuildProduct) -> None:
    """Refuse a config that the builder cannot honour; see `EngineBuilder.check`.

    Raises:
        FileError: the file that `build.confidence` names cannot be read.
    """
    build = config.build
    if build.draft and not builder_of(config).DRAFTS:
        raise ConfigError(
            f"build.draft = {build.draft!r}, but engines with build.runtime = {build.runtime!r} "
            'hold no draft; leave it out, or build with build.runtime = "native"'
        )
    if build.calibrate and not builder_of(config).CALIBRATES:
        raise ConfigError(
            f"--calibrate, but build.runtime = {build.runtime!r} has its own builder "
            'round the weights; leave it out, or build with build.runtime = "native"'
        )
    read_confidence(build.confidence)
    builder_of(config).check(config)


def build_engine(
    checkpoint: Checkpoint,
    config: BuildProduct,
    log: Log,
    verify: Callable[[Engine], None] | None = None,
) -> Engine:
    """Build an engine in `config.engine`, where one is replaced only when all has succeeded.

    Args:
        checkpoint: `config.build.checkpoint`, opened.
        config: what to build, and the limits to build it for.
        log: called with each line that the builder has to say.
        verify: called with the finished engine before it takes its place; raises if it is wrong.

    Raises:
        ConfigError: the builder cannot honour the config.
        EarshotError: as `EngineBuilder.fill` says.
    """
    check(config)
    target = Path(config.engine)
    with staged(target) as folder:
        fill(folder, checkpoint, config, log)
        if verify is not None:
            verify(open_engine(folder))
    return open_engine(target)


def fill(folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log) -> None:
    """Write every file of an engine into an empty folder and bring them to the disk.

    Raises:
        EarshotError: as `EngineBuilder.fill` says.
    """
    with disk_errors(folder):
        (folder / TOKENIZER_FILE).write_bytes(checkpoint.tokenizer_json)
        write_mel_filters(folder, checkpoint.dims.n_mels)
    made = builder_of(config).fill(folder, checkpoint, config, log)
    write_manifest(folder, manifest_of(folder, checkpoint, config.build, made))


def _stated(manifest: Manifest, checkpoint: Checkpoint) -> TokenizerFacts:
    """Return an engine's facts, without alignment heads that the build has measured itself."""
    if checkpoint.facts.alignment_heads:
        return manifest.tokenizer
    return dataclasses.replace(manifest.tokenizer, alignment_heads=())


def up_to_date(checkpoint: Checkpoint, config: BuildProduct, verified: bool) -> bool:
    """Return whether `config.engine` is a sound engine, the same that a build would write now.

    `verified` asks for one that has passed its verification too, where its builder has one.

    Raises:
        UnavailableError, CheckpointError: a build would be refused.
    """
    builder = builder_of(config)
    try:
        engine = open_engine(config.engine)
    except EngineError:
        return False
    manifest = engine.manifest
    tokenizer = manifest.files.get(TOKENIZER_FILE)
    if verified and builder.VERIFIES and manifest.verification is None:
        return False
    return (
        manifest.runtime == config.build.runtime
        and manifest.precision == config.build.precision
        and manifest.dims == checkpoint.dims
        and _stated(manifest, checkpoint) == checkpoint.facts
        and manifest.source.sha256 == checkpoint.source.sha256
        and manifest.draft == draft_facts(checkpoint)
        and manifest.confidence == read_confidence(config.build.confidence)
        and MEL_FILTERS_FILE in manifest.files
        and tokenizer is not None
        and tokenizer.sha256 == hashlib.sha256(checkpoint.tokenizer_json).hexdigest()
        and builder.is_current(engine, checkpoint, config)
    )
