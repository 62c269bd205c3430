"""The writing of engines, for every builder: a folder that appears whole, and its manifest.

An engine is made in a hidden folder beside its target and takes the target's place in one rename
at the very end. So a build that is killed, interrupted or out of disk space changes nothing that a
server may be reading; what a killed build leaves behind is removed by the next one.
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
from serve.contract.files import read_text

Log = Callable[[str], None]
"""Called with each line that a builder has to say."""

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_LOCK = ".lock"
_AT_FDCWD = -100  # <fcntl.h>: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # <linux/fs.h>: swap two paths


def finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor itself.

    Raises:
        CheckpointError: it holds NaN or infinity; `name` is in the message.
    """
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"{name} holds NaN, infinity or values beyond float16's range; the checkpoint is "
            "damaged or was not made for float16"
        )
    return tensor


@dataclasses.dataclass(frozen=True)
class BuiltEngineFacts:
    """The facts that a builder adds to the manifest about the files that it wrote."""

    quantization: dict[str, LayerError] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of its own libraries
    runtime_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    calibration: Calibration | None = None


def manifest_of(
    folder: Path, checkpoint: Checkpoint, build: BuildConfig, made: BuiltEngineFacts
) -> Manifest:
    """Return the manifest of an engine whose other files are all in `folder`, unverified.

    Raises:
        EngineError: the disk fails.
        FileError, ConfigError: as `read_confidence`.
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
        quantization=made.quantization,
        versions=versions() | made.versions,
        files=files,
        checkpoint_bytes=checkpoint.weight_bytes,
        verification=None,
        runtime_options=made.runtime_options,
        draft=draft_facts(checkpoint),
        calibration=made.calibration,
        confidence=read_confidence(build.confidence),
    )


def read_confidence(path: str) -> Confidence | None:
    """Read the fit that `build.confidence` names; None where it names none.

    Raises:
        FileError: it cannot be read.
        ConfigError: it is no fit.
    """
    if not path:
        return None
    expected = "expected what `python -m eval trust` fitted"
    return from_json(Confidence, read_text(path, expected), path, advice=expected)


def file_facts(folder: Path) -> dict[str, FileFacts]:
    """Return facts of every file below a folder, by path, once it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    return {
        path.relative_to(folder).as_posix(): FileFacts(sha256_of(path), path.stat().st_size)
        for path in files
    }


def versions() -> dict[str, str]:
    """Return the versions of Earshot itself, Python and the libraries that build here, by name."""
    with _PROJECT.open("rb") as file:
        own = {"earshot": tomllib.load(file)["project"]["version"]}
    own["python"] = platform.python_version()
    packages = ("torch", "safetensors", "transformers")
    return own | {name: importlib.metadata.version(name) for name in packages}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace a folder's `engine.json` atomically.

    Raises:
        EngineError: the disk is full or fails; the old manifest is still there.
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
    """Give an empty folder that becomes the engine at `target` when the block succeeds.

    If the block raises, KeyboardInterrupt included, the folder is removed and `target` is as it
    was. What killed builds of the same target left behind is removed first.

    Raises:
        EngineError: `target` holds something other than an engine, or the disk is full or fails.
    """
    target = target.resolve()
    _refuse_foreign(target)
    with contextlib.ExitStack() as stack:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(_new_folder(target))
        yield folder
        with disk_errors(target):
            _publish(folder, target)


def _refuse_foreign(target: Path) -> None:
    """Never replace what is not an engine."""
    if not target.exists() or (target / MANIFEST_FILE).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise EngineError(
            f"{target} exists and is not an engine (it has no {MANIFEST_FILE}); "
            "name another folder, or remove it"
        )


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Give a hidden folder beside `target`, with a lock file that a killed process lets go of."""
    prefix = f".{target.name}.building-"
    for path in target.parent.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(_LOCK):
            _remove_abandoned(path)
    folder = target.with_name(prefix + secrets.token_hex(4))
    lock = folder.with_name(f"{folder.name}{_LOCK}")
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.mkdir()
            yield folder
        finally:
            # Holds the unfinished engine, or the one that was replaced, or is already gone.
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_abandoned(lock: Path) -> None:
    with lock.open("r+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another build of the same target is at work
        shutil.rmtree(str(lock).removesuffix(_LOCK), ignore_errors=True)
        lock.unlink(missing_ok=True)


def _publish(folder: Path, target: Path) -> None:
    """Put the finished folder in the target's place; an old engine takes the folder's."""
    if target.exists():
        _exchange(folder, target)
    else:
        os.rename(folder, target)
    sync(target.parent)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders in one step, which os.rename cannot: Linux's renameat2(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b))
    if libc.renameat2(*paths, _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, "this filesystem cannot swap folders; remove the old engine first")
    raise OSError(code, os.strerror(code))


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn a failure of the disk inside the block into an EngineError that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        existing = next(p for p in (target, *target.parents) if p.exists())
        free = shutil.disk_usage(existing).free / 1e6
        raise EngineError(
            f"cannot write {target}: {reason} ({free:,.0f} MB free there); nothing was changed"
        ) from error
