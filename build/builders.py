"""The interface and the table of the engine builders, and their common parts.

A builder is a module for one runtime, which writes the runtime's files into a folder. The atomic
replacement of the folder, the tokenizer, the manifest and the verification are common to all.
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
    """Whether `build.verify` can compare the engines with their checkpoint."""
    COMPARED_BY: str
    """The command line that compares them."""
    DRAFTS: bool
    """Whether the engines can have a draft decoder."""
    CALIBRATES: bool
    """Whether the builder compensates rounding errors on calibration clips."""

    def check(self, config: BuildProduct) -> None:
        """Check that this builder supports a config, before a checkpoint is opened.

        Raises:
            ConfigError: it does not; the message names the key, its value and what to do.
        """
        ...

    def commands(self, dims: Dims, config: BuildProduct) -> list[list[str]]:
        """Return the commands that a build runs; this needs neither library nor GPU."""
        ...

    def fill(
        self, folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log
    ) -> BuiltEngineFacts:
        """Write this runtime's files into an engine folder that has the tokenizer and mel filters.

        Raises:
            UnavailableError: this machine lacks a requirement of the build.
            CheckpointError: the runtime cannot execute the checkpoint.
            EngineError: a command or the disk failed.
        """
        ...

    def is_current(self, engine: Engine, checkpoint: Checkpoint, config: BuildProduct) -> bool:
        """Return whether `fill` would write the same files again.

        Raises:
            UnavailableError, CheckpointError: a build would fail.
        """
        ...


# Only this table and that of serve.contract.runtimes know the runtimes by name.
_BUILDERS: dict[RuntimeName, EngineBuilder] = {
    "native": native,
    "tensorrt_llm": engines,
    "tensorrt_llm_api": llm_api,
}


def builder_for(runtime: RuntimeName) -> EngineBuilder:
    return _BUILDERS[runtime]


def builder_of(config: BuildProduct) -> EngineBuilder:
    return builder_for(config.build.runtime)


def check(config: BuildProduct) -> None:
    """Check that the config's builder supports it.

    Raises:
        ConfigError: it does not; see `EngineBuilder.check`.
        FileError: the file that `build.confidence` names cannot be read.
    """
    build = config.build
    if build.draft and not builder_of(config).DRAFTS:
        raise ConfigError(
            f"build.draft = {build.draft!r}, but engines with build.runtime = {build.runtime!r} "
            'have no draft decoder; leave it out, or build with build.runtime = "native"'
        )
    if build.calibrate and not builder_of(config).CALIBRATES:
        raise ConfigError(
            f"--calibrate, but builds with build.runtime = {build.runtime!r} do not calibrate; "
            'leave it out, or build with build.runtime = "native"'
        )
    read_confidence(build.confidence)
    builder_of(config).check(config)


def build_engine(
    checkpoint: Checkpoint,
    config: BuildProduct,
    log: Log,
    verify: Callable[[Engine], None] | None = None,
) -> Engine:
    """Build the engine `config.engine`; replace an existing one only after a successful build.

    Args:
        checkpoint: the opened `config.build.checkpoint`.
        config: the settings of the build, and the runtime's limits.
        log: called with each line of the builder's log.
        verify: called with the finished engine before it replaces another; may raise an error.

    Raises:
        ConfigError: the builder does not support the config.
        EarshotError: see `EngineBuilder.fill`.
    """
    check(config)
    target = Path(config.engine)
    with staged(target) as folder:
        fill(folder, checkpoint, config, log)
        if verify is not None:
            verify(open_engine(folder))
    return open_engine(target)


def fill(folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log) -> None:
    """Write all files of an engine into an empty folder, and sync them to the disk.

    Raises:
        EarshotError: see `EngineBuilder.fill`.
    """
    with disk_errors(folder):
        (folder / TOKENIZER_FILE).write_bytes(checkpoint.tokenizer_json)
        write_mel_filters(folder, checkpoint.dims.n_mels)
    made = builder_of(config).fill(folder, checkpoint, config, log)
    write_manifest(folder, manifest_of(folder, checkpoint, config.build, made))


def _checkpoint_facts(manifest: Manifest, checkpoint: Checkpoint) -> TokenizerFacts:
    """Return an engine's facts without alignment heads that the build has measured."""
    if checkpoint.facts.alignment_heads:
        return manifest.tokenizer
    return dataclasses.replace(manifest.tokenizer, alignment_heads=())


def up_to_date(checkpoint: Checkpoint, config: BuildProduct, verified: bool) -> bool:
    """Return whether `config.engine` exists and a build would write the same engine again.

    With `verified`, the engine must also have passed the verification, if its builder has one.

    Raises:
        UnavailableError, CheckpointError: a build would fail.
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
        and _checkpoint_facts(manifest, checkpoint) == checkpoint.facts
        and manifest.source.sha256 == checkpoint.source.sha256
        and manifest.draft == draft_facts(checkpoint)
        and manifest.confidence == read_confidence(config.build.confidence)
        and MEL_FILTERS_FILE in manifest.files
        and tokenizer is not None
        and tokenizer.sha256 == hashlib.sha256(checkpoint.tokenizer_json).hexdigest()
        and builder.is_current(engine, checkpoint, config)
    )
