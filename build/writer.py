"""Write engine folders atomically, and their manifests, for every builder.

An engine is built in a hidden folder beside its target and replaces the target by one rename at the
end. A build that is killed, interrupted or out of disk space therefore never changes an engine that
a server may be reading. The next build removes the files of a killed build.
"""

import contextlib
import ctypes
import dataclasses
import errno
import importlib.metadata
import os
import platform
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from build.checkpoint import Checkpoint
from build.config import BuildConfig
from build.draft import draft_facts
from serve.contract.codec import from_json
from serve.contract.engine import sha256_of
from serve.contract.errors import CheckpointError, EngineError
from serve.contract.files import partial_folder, read_text, sync, write_text
from serve.contract.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Calibration,
    Confidence,
    FileFacts,
    LayerError,
    Manifest,
    manifest_to_json,
)

Log = Callable[[str], None]
"""A function that is called with each line of a builder's log."""

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_AT_FDCWD = -100  # <fcntl.h>: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # <linux/fs.h>: swap two paths


def finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor if all its numbers are finite.

    Raises:
        CheckpointError: it holds NaN or infinity; the message has `name`.
    """
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"{name} holds NaN, infinity or values beyond float16's range; the checkpoint is "
            "damaged, or does not support float16; fetch it again, or use another one"
        )
    return tensor


@dataclasses.dataclass(frozen=True)
class BuiltEngineFacts:
    """The facts that a builder adds to the manifest."""

    quantization: dict[str, LayerError] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of the builder's libraries
    runtime_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    calibration: Calibration | None = None


def manifest_of(
    folder: Path, checkpoint: Checkpoint, build: BuildConfig, facts: BuiltEngineFacts
) -> Manifest:
    """Make the manifest of an unverified engine; `folder` already has its other files.

    Raises:
        EngineError: the disk fails.
        FileError, ConfigError: see `read_confidence`.
    """
    with disk_errors(folder):
        files = file_facts(folder)
    return Manifest(
        format_version=FORMAT_VERSION,
        runtime=build.runtime,
        precision=build.precision,
        dims=checkpoint.dims,
        tokenizer=checkpoint.facts,
        source=checkpoint.source,
        quantization=facts.quantization,
        versions=versions() | facts.versions,
        files=files,
        checkpoint_bytes=checkpoint.weight_bytes,
        verification=None,
        runtime_options=facts.runtime_options,
        draft=draft_facts(checkpoint),
        calibration=facts.calibration,
        confidence=read_confidence(build.confidence),
    )


def read_confidence(path: str) -> Confidence | None:
    """Read the file that `build.confidence` names; return None if it is empty.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the file is not a result of `python -m eval trust`.
    """
    if not path:
        return None
    expected = "expected a file that `python -m eval trust` has written"
    return from_json(Confidence, read_text(path, expected), path, advice=expected)


def file_facts(folder: Path) -> dict[str, FileFacts]:
    """Sync every file below a folder to the disk, and return their facts by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    return {
        path.relative_to(folder).as_posix(): FileFacts(sha256_of(path), path.stat().st_size)
        for path in files
    }


def versions() -> dict[str, str]:
    """Return the versions of Earshot, Python and the libraries of a build, by name."""
    with _PROJECT.open("rb") as file:
        found = {"earshot": tomllib.load(file)["project"]["version"]}
    found["python"] = platform.python_version()
    packages = ("torch", "safetensors", "transformers")
    return found | {name: importlib.metadata.version(name) for name in packages}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace a folder's `engine.json` atomically.

    Raises:
        FileError: the disk is full or fails; the old manifest is unchanged.
    """
    write_text(folder / MANIFEST_FILE, manifest_to_json(manifest), "nothing was changed")
    sync(folder)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes the engine at `target` if the block succeeds.

    If the block raises, even KeyboardInterrupt, the folder is removed and `target` is unchanged.
    Another build of the same target is awaited.

    Raises:
        EngineError: `target` exists and is not an engine, or the disk is full or fails.
    """
    target = target.resolve()
    is_engine = (target / MANIFEST_FILE).is_file()
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_engine and not is_empty_folder:
        raise EngineError(
            f"{target} exists and is not an engine (it has no {MANIFEST_FILE}); "
            "name another folder, or remove it"
        )
    with contextlib.ExitStack() as stack:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(partial_folder(target))
        yield folder
        with disk_errors(target):
            _publish(folder, target)


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn disk errors inside the context into an EngineError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        existing = next(p for p in (target, *target.parents) if p.exists())
        free_mb = shutil.disk_usage(existing).free / 1e6
        raise EngineError(
            f"cannot write {target}: {reason} ({free_mb:,.0f} MB free there); nothing was changed"
        ) from error


def _publish(folder: Path, target: Path) -> None:
    """Rename the finished folder to the target; swap the two atomically if there is an engine."""
    if not target.exists():
        os.rename(folder, target)
    else:  # os.rename cannot swap folders; Linux's renameat2(2) can
        paths = (_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(target))
        if ctypes.CDLL(None, use_errno=True).renameat2(*paths, _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            reason = os.strerror(code)
            if code in (errno.EINVAL, errno.ENOSYS):
                reason = "this filesystem cannot swap folders; remove the old engine first"
            raise OSError(code, reason)
    sync(target.parent)
