"""Build engines for TensorRT-LLM's LLM API: engine folders with the Hugging Face checkpoint.

TensorRT-LLM 1.3 and later do not compile engines, so a build needs neither the library nor a GPU.
It copies the files, so that the folder can be moved and does not change with its source.
"""

import shutil
from pathlib import Path

from build.checkpoint import Checkpoint, folder_files
from build.config import BuildProduct
from build.hub import GENERATION_CONFIG, PROCESSOR_CONFIGS
from build.writer import BuiltEngineFacts, Log, disk_errors, finite
from serve.contract.engine import MEL_FILTERS_FILE, Engine, sha256_of
from serve.contract.errors import CheckpointError, ConfigError
from serve.contract.manifest import TOKENIZER_FILE
from serve.trtllm.limits import CHECKPOINT_FOLDER

_FORMATS = {"openai": "an OpenAI checkpoint", "ct2": "a CTranslate2 checkpoint"}
_WEIGHT_SUFFIXES = (".safetensors", ".bin")  # files that `CheckpointSource.sha256` covers


def check(config: BuildProduct) -> None:
    """Check that the LLM API supports a config.

    Raises:
        ConfigError: the config asks for quantised weights or for another tokenizer.
    """
    build = config.build
    if build.precision != "fp16":
        raise ConfigError(
            f"build.precision = {build.precision!r}, but TensorRT-LLM's LLM API runs Whisper "
            'without quantisation; build with PRECISION=fp16, or with build.runtime = "native"'
        )
    if build.tokenizer:
        raise ConfigError(
            f"--tokenizer {build.tokenizer!r}, but TensorRT-LLM's LLM API uses the checkpoint's "
            "own tokenizer; copy the tokenizer's files into the checkpoint's folder, and leave it "
            "out"
        )


def fill(folder: Path, checkpoint: Checkpoint, config: BuildProduct, log: Log) -> BuiltEngineFacts:
    """Copy the checkpoint's files.

    Raises:
        CheckpointError: the checkpoint lacks files that the library reads, or a tensor is not
            finite in float16.
        EngineError: the disk is full or fails.
    """
    sources = _sources(checkpoint)
    for name, tensor in checkpoint.tensors.items():  # the library casts without a check
        finite(tensor.half(), name)
    with disk_errors(folder):
        (folder / CHECKPOINT_FOLDER).mkdir()
        for source in sources:
            shutil.copyfile(source, folder / CHECKPOINT_FOLDER / source.name)
            log(f"copied {source} ({source.stat().st_size:,} bytes)")
    return BuiltEngineFacts()


def is_current(engine: Engine, checkpoint: Checkpoint, config: BuildProduct) -> bool:
    """Return whether the copied files equal those of the checkpoint.

    The weights are not compared, because `CheckpointSource.sha256` covers them.

    Raises:
        CheckpointError: the checkpoint lacks files that the library reads.
    """
    files = engine.manifest.files
    source_by_copy = {f"{CHECKPOINT_FOLDER}/{path.name}": path for path in _sources(checkpoint)}
    hashed = {
        name: path for name, path in source_by_copy.items() if path.suffix not in _WEIGHT_SUFFIXES
    }
    return files.keys() == {TOKENIZER_FILE, MEL_FILTERS_FILE, *source_by_copy} and all(
        files[name].sha256 == sha256_of(path) for name, path in hashed.items()
    )


def _sources(checkpoint: Checkpoint) -> list[Path]:
    """Return the files to copy.

    Raises:
        CheckpointError: the LLM API cannot load them.
    """
    if checkpoint.naming != "hf":
        raise CheckpointError(
            f"{checkpoint.path} is {_FORMATS[checkpoint.naming]}, but TensorRT-LLM's LLM API only "
            "loads Hugging Face folders; name one, or build with build.runtime = 'native'"
        )
    sources = folder_files(checkpoint.path)
    names = {path.name for path in sources}
    missing = [name for name in (GENERATION_CONFIG, TOKENIZER_FILE) if name not in names]
    if not names.intersection(PROCESSOR_CONFIGS):
        missing.append(PROCESSOR_CONFIGS[0])
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has no {', '.join(missing)}, which TensorRT-LLM's LLM API reads; "
            "copy them from the published folder, or save them there with transformers"
        )
    return sources
