"""An engine for TensorRT-LLM's LLM API: the Hugging Face checkpoint itself, in an engine folder.

TensorRT-LLM 1.3 and later compile nothing, so neither the library nor a GPU is needed here. The
files are copied, so that the folder can be moved and does not change with its source.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from build.checkpoint import Checkpoint, folder_files
from build.config import BuildConfig
from build.writer import (
    disk_errors,
    file_facts,
    finite,
    staged,
    versions,
    write_common_files,
    write_manifest,
)
from serve.engine import (
    FORMAT_VERSION,
    MEL_FILTERS_FILE,
    TOKENIZER_FILE,
    Engine,
    Manifest,
    open_engine,
    sha256_of,
)
from serve.errors import CheckpointError, ConfigError, EngineError
from serve.hub import GENERATION_CONFIG, PROCESSOR_CONFIGS
from serve.trtllm.limits import CHECKPOINT_FOLDER

Log = Callable[[str], None]

_KNOWN_BY_SOURCE = (".safetensors", ".bin")  # files that `Source.sha256` covers


def build_engine(checkpoint: Checkpoint, build: BuildConfig, target: Path, log: Log) -> Engine:
    """Write the engine folder.

    Args:
        checkpoint: of a Hugging Face folder.
        build: what was asked for.
        target: the engine folder; replaced only when everything has succeeded.
        log: called with a line for each file copied.

    Raises:
        ConfigError: `build` asks for what the LLM API cannot do.
        CheckpointError: the checkpoint lacks files that the library reads, or a tensor is not
            finite in float16.
        EngineError: the disk is full or fails.
    """
    sources = _sources(checkpoint, build)
    for name, tensor in checkpoint.tensors.items():  # the library casts without a look
        finite(tensor.half(), name)
    with staged(target) as folder:
        with disk_errors(target):
            (folder / CHECKPOINT_FOLDER).mkdir()
            for source in sources:
                shutil.copyfile(source, folder / CHECKPOINT_FOLDER / source.name)
                log(f"copied {source} ({source.stat().st_size:,} bytes)")
            write_common_files(folder, checkpoint)
            files = file_facts(folder)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            runtime="tensorrt_llm_api",
            precision=build.precision,
            dims=checkpoint.dims,
            tokenizer=checkpoint.facts,
            source=checkpoint.source,
            quantization={},
            versions=versions(),
            files=files,
            checkpoint_bytes=checkpoint.weight_bytes,
            verification=None,  # `python -m eval trtllm-check` compares with transformers
            runtime_options={},
        )
        write_manifest(folder, manifest)
    return open_engine(target)


def up_to_date(target: Path, checkpoint: Checkpoint, build: BuildConfig) -> bool:
    """Whether `target` is a sound engine, the same that a build would write.

    Raises:
        ConfigError, CheckpointError: a build would be refused.
    """
    sources = _sources(checkpoint, build)
    try:
        manifest = open_engine(target).manifest
    except EngineError:
        return False
    copies = {f"{CHECKPOINT_FOLDER}/{path.name}": path for path in sources}
    small = {n: p for n, p in copies.items() if p.suffix not in _KNOWN_BY_SOURCE}
    return (
        manifest.runtime == "tensorrt_llm_api"
        and manifest.dims == checkpoint.dims
        and manifest.tokenizer == checkpoint.facts
        and manifest.source.sha256 == checkpoint.source.sha256
        and manifest.files.keys() == {TOKENIZER_FILE, MEL_FILTERS_FILE, *copies}
        and all(manifest.files[name].sha256 == sha256_of(path) for name, path in small.items())
    )


def _sources(checkpoint: Checkpoint, build: BuildConfig) -> list[Path]:
    """The files to copy, if the LLM API can do with them what is asked."""
    if build.precision != "fp16":
        raise ConfigError(
            f"build.precision = {build.precision!r}, but TensorRT-LLM's LLM API runs Whisper "
            'without quantisation; build with PRECISION=fp16, or with build.runtime = "native"'
        )
    if checkpoint.naming != "hf":
        raise CheckpointError(
            f"{checkpoint.path} is an OpenAI checkpoint, but TensorRT-LLM's LLM API loads Hugging "
            "Face folders; convert it with transformers, or build with build.runtime = 'native'"
        )
    if build.tokenizer:
        raise ConfigError(
            f"build.tokenizer = {build.tokenizer!r}, but TensorRT-LLM's LLM API reads the "
            "checkpoint's own; put its files into the checkpoint's folder, and leave it out"
        )
    sources = folder_files(checkpoint.path)
    names = {path.name for path in sources}
    missing = [name for name in (GENERATION_CONFIG, TOKENIZER_FILE) if name not in names]
    if not names.intersection(PROCESSOR_CONFIGS):
        missing.append(PROCESSOR_CONFIGS[0])
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {', '.join(missing)}, which TensorRT-LLM's LLM API reads; "
            "take them from the published folder, or save them there with transformers"
        )
    return sources
