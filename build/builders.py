"""The table of the engine builders, and their common parts.

A builder writes one runtime's files into a folder. The atomic replacement of the folder, the
tokenizer, the manifest and the verification are common to all.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

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
from serve.contract.engine import MEL_FILTERS_FILE, Engine, open_engine, write_mel_filters
from serve.contract.errors import ConfigError, EngineError
from serve.contract.manifest import TOKENIZER_FILE
from serve.contract.runtimes import RuntimeName


@dataclasses.dataclass(frozen=True)
class EngineBuilder:
    """Builds engines for one runtime.

    Attributes:
        fill: writes the runtime's files into an engine folder that has the tokenizer and the mel
            filters. It raises an UnavailableError if this machine lacks a requirement of the
            build, a CheckpointError if the runtime cannot execute the checkpoint, and an
            EngineError if a command or the disk failed.
        is_current: returns whether `fill` would write the same files again. It raises an
            UnavailableError or a CheckpointError if a build would fail.
        compare_command: the command line that compares an engine with its checkpoint.
        check: raises a ConfigError if the builder does not support a config.
        native: whether Earshot computes with the weights itself. Only such engines are calibrated
            and verified by `build.verify`, and only they can have a draft decoder.
    """

    fill: Callable[[Path, Checkpoint, BuildProduct, Log], BuiltEngineFacts]
    is_current: Callable[[Engine, Checkpoint, BuildProduct], bool]
    compare_command: str = "python -m eval trtllm-check"
    check: Callable[[BuildProduct], None] = lambda _: None
    native: bool = False


# Only this table and that of serve.contract.runtimes know the runtimes by name.
BUILDERS: dict[RuntimeName, EngineBuilder] = {
    "native": EngineBuilder(
        native.fill, native.is_current, compare_command="python -m build verify", native=True
    ),
    "tensorrt_llm": EngineBuilder(engines.fill, engines.is_current, check=engines.check),
    "tensorrt_llm_api": EngineBuilder(llm_api.fill, llm_api.is_current, check=llm_api.check),
}


def check(config: BuildProduct, flags: Mapping[str, object] = MappingProxyType({})) -> None:
    """Check that the config's builder supports it, before a checkpoint is opened.

    Args:
        config: the settings of the build.
        flags: the values of flags that only a native engine can use, by name.

    Raises:
        ConfigError: the builder does not support the config.
        FileError: the file that `build.confidence` names cannot be read.
    """
    build, builder = config.build, BUILDERS[config.build.runtime]
    options = {"build.draft": build.draft, "--calibrate": build.calibrate, **flags}
    for name, value in options.items():
        if value and not builder.native:
            raise ConfigError(
                f"{name} is for native engines, but build.runtime = {build.runtime!r}; leave it "
                'out, or build with build.runtime = "native" (to compare an engine of this runtime '
                f"with its checkpoint, run `{builder.compare_command}`)"
            )
    read_confidence(build.confidence)
    builder.check(config)


def build_engine(
    checkpoint: Checkpoint,
    config: BuildProduct,
    log: Log,
    verify: Callable[[Engine], None] | None = None,
) -> Engine:
    """Build the engine `config.engine`; replace an existing one only after a successful build.

    Args:
        checkpoint: the opened `config.build.checkpoint`.
        config: the settings of the build, which passed `check`, and the runtime's limits.
        log: called with each line of the builder's log.
        verify: called with the finished engine before it replaces another; may raise an error.

    Raises:
        EarshotError: see `EngineBuilder.fill`.
    """
    target = Path(config.engine)
    with staged(target) as folder:
        with disk_errors(folder):
            (folder / TOKENIZER_FILE).write_bytes(checkpoint.tokenizer_json)
            write_mel_filters(folder, checkpoint.dims.n_mels)
        facts = BUILDERS[config.build.runtime].fill(folder, checkpoint, config, log)
        write_manifest(folder, manifest_of(folder, checkpoint, config.build, facts))
        if verify is not None:
            verify(open_engine(folder))
    return open_engine(target)


def up_to_date(checkpoint: Checkpoint, config: BuildProduct, verified: bool) -> bool:
    """Return whether `config.engine` exists and a build would write the same engine again.

    With `verified`, the engine must also have passed the verification, if its builder has one.

    Raises:
        UnavailableError, CheckpointError: a build would fail.
    """
    builder = BUILDERS[config.build.runtime]
    try:
        engine = open_engine(config.engine)
    except EngineError:
        return False
    manifest = engine.manifest
    tokenizer, facts = manifest.files.get(TOKENIZER_FILE), manifest.tokenizer
    if not checkpoint.facts.alignment_heads:  # the build may have measured them
        facts = dataclasses.replace(facts, alignment_heads=())
    if verified and builder.native and manifest.verification is None:
        return False
    return (
        manifest.runtime == config.build.runtime
        and manifest.precision == config.build.precision
        and manifest.dims == checkpoint.dims
        and facts == checkpoint.facts
        and manifest.source.sha256 == checkpoint.source.sha256
        and manifest.draft == draft_facts(checkpoint)
        and manifest.confidence == read_confidence(config.build.confidence)
        and MEL_FILTERS_FILE in manifest.files
        and tokenizer is not None
        and tokenizer.sha256 == hashlib.sha256(checkpoint.tokenizer_json).hexdigest()
        and builder.is_current(engine, checkpoint, config)
    )
