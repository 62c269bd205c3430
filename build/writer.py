"""Write engine folders atomically, and their manifests, for every builder.

An engine is built in a hidden folder beside its target and replaces the target by one rename at the
end. A build that is killed, interrupted or out of disk space therefore never changes an engine that
a server may be reading. The next build removes the files of a killed build.
"""

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import importlib.metadata
import os
import platform
import secrets
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
from serve.contract.engine import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Calibration,
    Confidence,
    FileFacts,
    LayerError,
    Manifest,
    manifest_to_json,
    sha256_of,
)
from serve.contract.errors import CheckpointError, EngineError
from serve.contract.files import read_text, sync

Log = Callable[[str], None]
"""A function that is called with each line of a builder's log."""

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_LOCK = ".lock"
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
    """Make the manifest of an unverified engine; all its other files are in `folder`.

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
        EngineError: the disk is full or fails; the old manifest is unchanged.
    """
    temporary = folder / f".{MANIFEST_FILE}.new"
    with disk_errors(folder):
        try:
            temporary.write_text(manifest_to_json(manifest), encoding="utf-8")
            sync(temporary)
            os.replace(temporary, folder / MANIFEST_FILE)
        finally:
            temporary.unlink(missing_ok=True)
        sync(folder)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes the engine at `target` if the block succeeds.

    If the block raises, even KeyboardInterrupt, the folder is removed and `target` is unchanged.
    Folders of killed builds of the same target are removed first.

    Raises:
        EngineError: `target` exists and is not an engine, or the disk is full or fails.
    """
    target = target.resolve()
    _require_engine_or_nothing(target)
    with contextlib.ExitStack() as stack:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(_new_folder(target))
        yield folder
        with disk_errors(target):
            _publish(folder, target)


def _require_engine_or_nothing(target: Path) -> None:
    """Raise an error if the target exists and is not an engine."""
    if not target.exists() or (target / MANIFEST_FILE).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise EngineError(
            f"{target} exists and is not an engine (it has no {MANIFEST_FILE}); "
            "name another folder, or remove it"
        )


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `target`, with a lock that the kernel frees if we are killed."""
    prefix = f".{target.name}.building-"
    for path in target.parent.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(_LOCK):
            _remove_abandoned(path)
    folder = target.with_name(prefix + secrets.token_hex(4))
    lock = folder.with_name(f"{folder.name}{_LOCK}")
    with lock.open("w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.mkdir()
            yield folder
        finally:
            # The folder has the unfinished engine or the replaced one, or does not exist any more.
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_abandoned(lock: Path) -> None:
    with lock.open("r+") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another build of the same target is running
        shutil.rmtree(str(lock).removesuffix(_LOCK), ignore_errors=True)
        lock.unlink(missing_ok=True)


def _publish(folder: Path, target: Path) -> None:
    """Rename the finished folder to the target; swap the two if there is an old engine."""
    if target.exists():
        _exchange(folder, target)
    else:
        os.rename(folder, target)
    sync(target.parent)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders atomically with Linux's renameat2(2); os.rename cannot do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b))
    if libc.renameat2(*paths, _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, "this filesystem cannot swap folders; remove the old engine first")
    raise OSError(code, os.strerror(code))


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
