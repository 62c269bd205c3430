"""Write the engine folder and its manifest, atomically.

An engine is made in a hidden folder beside its target and takes the target's place in one rename
at the very end. So a build that is killed, interrupted or out of disk space changes nothing that a
server may be reading; what a killed build leaves behind is removed by the next one.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import secrets
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from build.checkpoint import Checkpoint
from build.quantize import layer_error, quantize_rows
from serve.config import Precision
from serve.engine import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    MEL_FILTERS_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    FileFacts,
    LayerError,
    Manifest,
    manifest_to_json,
    open_engine,
    scale_name,
    sha256_of,
    tensor_kinds,
    write_mel_filters,
)
from serve.errors import CheckpointError, EngineError

Tensors = dict[str, torch.Tensor]

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_LOCK = ".lock"
_AT_FDCWD = -100  # <fcntl.h>: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # <linux/fs.h>: swap two paths


def convert(
    checkpoint: Checkpoint, precision: Precision, names: Iterable[str]
) -> tuple[Tensors, dict[str, LayerError]]:
    """Turn a checkpoint's tensors into an engine's, as `serve.engine.tensor_specs` lists them.

    Args:
        checkpoint: full-precision tensors.
        precision: "int8" or "fp16".
        names: every tensor's name, in any order; wrap it to show progress.

    Returns:
        The engine's tensors, and what quantising each matrix cost.

    Raises:
        CheckpointError: a tensor holds values that are not finite in float16.
    """
    kinds = {name: kind for name, _, kind in tensor_kinds(checkpoint.dims)}
    tensors: Tensors = {}
    errors: dict[str, LayerError] = {}
    for name in names:
        weight = checkpoint.tensors[name]
        quantized = {}
        if precision == "int8" and kinds[name] == "quantized":
            quantized[name] = weight
        else:
            tensors[name] = finite(weight.half().contiguous(), name)
        if precision == "int8" and name == "decoder.tokens":  # tied to the vocabulary projection
            quantized["decoder.logits.weight"] = weight
        for target, matrix in quantized.items():
            result = quantize_rows(matrix)
            tensors[target] = result.codes
            tensors[scale_name(target)] = finite(result.scale, name)
            errors[target] = layer_error(matrix, result)
    return tensors, errors


def finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor itself.

    Raises:
        CheckpointError: it holds NaN or infinity; `name` is in the message.
    """
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"{name} holds NaN, infinity or values beyond float16's range; the checkpoint is "
            "damaged or was not made for float16"
        )
    return tensor


def tensor_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the tensors that `convert` goes through."""
    return [name for name, _, _ in tensor_kinds(checkpoint.dims)]


def fill(folder: Path, checkpoint: Checkpoint, precision: Precision, names: Iterable[str]) -> None:
    """Write the files of an engine into an empty folder and bring them to the disk.

    Args:
        folder: as `staged` gives it.
        checkpoint, precision, names: as in `convert`.

    Raises:
        CheckpointError: a tensor holds values that are not finite in float16.
        EngineError: the disk is full or fails.
    """
    tensors, quantization = convert(checkpoint, precision, names)
    with disk_errors(folder):
        write_common_files(folder, checkpoint)
        save_file(tensors, folder / WEIGHTS_FILE)
        # save_file makes a private file; the server may run as another user than the build.
        shutil.copymode(folder / TOKENIZER_FILE, folder / WEIGHTS_FILE)
        files = file_facts(folder)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        runtime="native",
        precision=precision,
        dims=checkpoint.dims,
        tokenizer=checkpoint.facts,
        source=checkpoint.source,
        quantization=quantization,
        versions=versions(),
        files=files,
        checkpoint_bytes=checkpoint.weight_bytes,
        verification=None,
        runtime_options={},
    )
    write_manifest(folder, manifest)


def write_common_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Write what engines of every runtime hold: the tokenizer and the mel filters."""
    (folder / TOKENIZER_FILE).write_bytes(checkpoint.tokenizer_json)
    write_mel_filters(folder, checkpoint.dims.n_mels)


def file_facts(folder: Path) -> dict[str, FileFacts]:
    """Facts of every file below a folder, by path, once it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    return {
        path.relative_to(folder).as_posix(): FileFacts(sha256_of(path), path.stat().st_size)
        for path in files
    }


def versions() -> dict[str, str]:
    """What builds here: Earshot itself, Python and the libraries, by name."""
    with _PROJECT.open("rb") as file:
        found = {"earshot": tomllib.load(file)["project"]["version"]}
    found["python"] = platform.python_version()
    packages = ("torch", "safetensors", "transformers")
    return found | {name: importlib.metadata.version(name) for name in packages}


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
    """A hidden folder beside `target`, with a lock file that a killed process lets go of."""
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


def up_to_date(target: Path, checkpoint: Checkpoint, precision: Precision, verified: bool) -> bool:
    """Whether `target` is a sound engine, the same that a build would write.

    `verified` asks for one that has passed its verification too.
    """
    try:
        manifest = open_engine(target).manifest
    except EngineError:
        return False
    tokenizer = manifest.files.get(TOKENIZER_FILE)
    return (
        manifest.runtime == "native"
        and manifest.precision == precision
        and manifest.dims == checkpoint.dims
        and manifest.tokenizer == checkpoint.facts
        and manifest.source.sha256 == checkpoint.source.sha256
        and (manifest.verification is not None or not verified)
        and MEL_FILTERS_FILE in manifest.files
        and tokenizer is not None
        and tokenizer.sha256 == hashlib.sha256(checkpoint.tokenizer_json).hexdigest()
    )
