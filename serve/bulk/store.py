"""Files by name, wherever they lie: in a folder of this machine, or in an object store.

A name is a path or has a scheme. pyarrow knows s3://, gs://, abfs:// and hdfs://; what it does not
know is asked of fsspec. Keys and endpoints come from the environment, as these libraries say.
"""

import contextlib
import functools
import os
import uuid
from pathlib import Path

import fsspec
from pyarrow import ArrowException, fs

from serve.contract.errors import FileError, shown

_NO_FILE = {
    fs.FileType.NotFound: "there is none",
    fs.FileType.Directory: "it is a folder",
    fs.FileType.Unknown: "it is no ordinary file",
}
_BY_PYARROW = ("gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")


def full(name: str) -> str:
    """Complete a name, to be used from anywhere: a path without a scheme becomes absolute."""
    return name.rstrip("/") if "://" in name else str(Path(name).absolute())


def join(folder: str, name: str) -> str:
    """Name a file of a folder; a name that stands for itself stays as it is."""
    if "://" in name or name.startswith("/"):
        return name
    return f"{folder.rstrip('/')}/{name}"


def parent(name: str) -> str:
    """Return the folder that a file lies in."""
    return name.rpartition("/")[0]


def read(
    name: str,
    advice: str = "name a file that exists and that you may read",
    most_bytes: int | None = None,
) -> bytes:
    """Read a file's content; of one that has more than `most_bytes`, one byte more than these.

    Raises:
        FileError: it cannot be read.
    """
    kind = kind_of(name)
    if kind != fs.FileType.File:  # a pipe would keep its reader waiting
        raise FileError(f"cannot read {name}: {_NO_FILE[kind]}; {advice}")
    store, path = _located(name)
    try:
        with store.open_input_stream(path, compression=None) as file:
            content: bytes = file.read(None if most_bytes is None else most_bytes + 1)
    except (OSError, ArrowException) as error:
        raise FileError(f"cannot read {name}: {_reason(error)}; {advice}") from error
    return content


def write(name: str, content: bytes) -> None:
    """Write a file so that it is there as a whole or not at all; an older one is replaced.

    Raises:
        FileError: it cannot be written.
    """
    store, path = _located(name)
    folder, _, last = path.rpartition("/")
    partial = f"{folder}/.{last}.{uuid.uuid4().hex}"
    try:
        store.create_dir(folder, recursive=True)
        with store.open_output_stream(partial, compression=None) as file:
            file.write(content)
        store.move(partial, path)
    except (OSError, ArrowException) as error:
        with contextlib.suppress(OSError, ArrowException):  # it may not be there
            store.delete_file(partial)
        raise FileError(
            f"cannot write {name}: {_reason(error)}; name another --output that you may write to"
        ) from error


def delete(name: str) -> None:
    """Delete a file if it is there.

    Raises:
        FileError: it cannot be deleted.
    """
    if exists(name):
        store, path = _located(name)
        try:
            store.delete_file(path)
        except OSError as error:
            raise FileError(f"cannot delete {name}: {_reason(error)}") from error


def exists(name: str) -> bool:
    """Tell whether there is a file of this name; see `kind_of`."""
    return bool(kind_of(name) == fs.FileType.File)


def kind_of(name: str) -> fs.FileType:
    """Tell what a name stands for: a file, a folder or nothing.

    Raises:
        FileError: its store cannot be asked.
    """
    store, path = _located(name)
    try:
        return store.get_file_info(path).type
    except (OSError, ArrowException) as error:
        raise FileError(f"cannot reach {name}: {_reason(error)}") from error


def names_in(folder: str) -> list[str]:
    """List all files in a folder and below, relative to it, in order; hidden ones are left out.

    Raises:
        FileError: it cannot be listed, or a name in it is not UTF-8.
    """
    store, path = _located(folder)
    start = len(path.rstrip("/")) + 1
    try:
        infos = store.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        names = [info.path[start:] for info in infos if info.type == fs.FileType.File]
    except (OSError, ArrowException) as error:
        raise FileError(f"cannot list {folder}: {_reason(error)}") from error
    except UnicodeDecodeError as error:
        name = error.object.decode(errors="backslashreplace")
        raise FileError(f"{name} is not UTF-8; rename the file") from error
    return sorted(name for name in names if not name.rpartition("/")[2].startswith("."))


def _located(name: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a name, and its path there."""
    scheme, mark, rest = name.partition("://")
    if not mark or scheme == "file":
        return fs.LocalFileSystem(), rest if mark else str(Path(name).absolute())
    bucket, _, key = rest.partition("/")
    # A key may hold what no URI may, so that the bucket alone is read as one.
    store, base = _opened(scheme, bucket)
    return store, f"{base.rstrip('/')}/{key}".rstrip("/")


@functools.lru_cache(maxsize=64)
def _opened(scheme: str, bucket: str) -> tuple[fs.FileSystem, str]:
    address = f"{scheme}://{bucket}"
    try:
        if scheme == "s3":
            return _s3(), bucket
        if scheme in _BY_PYARROW:
            store, base = fs.FileSystem.from_uri(address)
        else:
            file_system, base = fsspec.core.url_to_fs(f"{address}/")
            store = fs.PyFileSystem(fs.FSSpecHandler(file_system))
    except (OSError, ValueError, ImportError, ArrowException) as error:
        raise FileError(
            f"cannot reach {shown(address)}: {_reason(error)}; expected a folder or a store that "
            "pyarrow or fsspec reaches, such as s3://bucket/folder"
        ) from error
    return store, base


def _s3() -> fs.FileSystem:
    """Open S3 by the environment; by a URI pyarrow would ask Amazon where any bucket is."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # as Amazon's own libraries take them
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if endpoint is None:
        return fs.S3FileSystem()
    scheme, mark, address = endpoint.partition("://")
    if not mark or scheme not in ("http", "https"):
        raise ValueError(f"the endpoint is {shown(endpoint)}; expected http://… or https://…")
    return fs.S3FileSystem(scheme=scheme, endpoint_override=address.rstrip("/"))


def _reason(error: Exception) -> str:
    """Say what went wrong, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.partition(". Detail:")[0].partition("\n")[0]
    return " ".join(str(error).split()) or type(error).__name__
