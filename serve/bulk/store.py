"""Read and write files by name, in local folders or object stores.

A name is a path, or a URI with a scheme. pyarrow serves s3://, gs://, abfs:// and hdfs://; fsspec
serves other schemes. Credentials and endpoints come from the environment variables of these
libraries.
"""

import contextlib
import functools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from pyarrow import ArrowException, fs

from serve.contract.errors import FileError, shown

_NO_FILE = {
    fs.FileType.NotFound: "it does not exist",
    fs.FileType.Directory: "it is a folder",
    fs.FileType.Unknown: "it is not a regular file",
}
_BY_PYARROW = ("gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")


def full(name: str) -> str:
    """Return the absolute name of a path; a URI stays as it is."""
    return name.rstrip("/") if "://" in name else str(Path(name).absolute())


def join(folder: str, name: str) -> str:
    """Join a folder and a name; a URI or an absolute path stays as it is."""
    if "://" in name or name.startswith("/"):
        return name
    return f"{folder.rstrip('/')}/{name}"


def parent(name: str) -> str:
    """Return the folder of a file."""
    return name.rpartition("/")[0]


def read(
    name: str,
    advice: str = "expected a file that exists and is readable",
    max_bytes: int | None = None,
) -> bytes:
    """Read a file's content, at most `max_bytes` + 1 bytes.

    Raises:
        FileError: the file cannot be read.
    """
    kind = kind_of(name)
    if kind != fs.FileType.File:  # reading a pipe would block
        raise FileError(f"cannot read {name}: {_NO_FILE[kind]}; {advice}")
    store, path = _located(name)
    with (
        _failing_with(f"cannot read {name}", advice),
        store.open_input_stream(path, compression=None) as file,
    ):
        content: bytes = file.read(None if max_bytes is None else max_bytes + 1)
        return content


def write(name: str, content: bytes) -> None:
    """Write a file atomically; an older file is replaced.

    Raises:
        FileError: the file cannot be written.
    """
    store, path = _located(name)
    folder, _, last = path.rpartition("/")
    partial = f"{folder}/.{last}.{uuid.uuid4().hex}"
    with _failing_with(f"cannot write {name}", "expected a writable --output"):
        try:
            store.create_dir(folder, recursive=True)
            with store.open_output_stream(partial, compression=None) as file:
                file.write(content)
            store.move(partial, path)
        except (OSError, ArrowException):
            with contextlib.suppress(OSError, ArrowException):  # it may not exist
                store.delete_file(partial)
            raise


def delete(name: str) -> None:
    """Delete a file if it exists.

    Raises:
        FileError: the file cannot be deleted.
    """
    if exists(name):
        store, path = _located(name)
        with _failing_with(f"cannot delete {name}"):
            store.delete_file(path)


def exists(name: str) -> bool:
    """Return whether a file exists; see `kind_of`."""
    return bool(kind_of(name) == fs.FileType.File)


def kind_of(name: str) -> fs.FileType:
    """Return whether a name is a file, a folder or nothing.

    Raises:
        FileError: its store cannot be reached.
    """
    store, path = _located(name)
    with _failing_with(f"cannot reach {name}"):
        return store.get_file_info(path).type


def names_in(folder: str) -> list[str]:
    """List the files below a folder, relative to it and sorted, without hidden files.

    Raises:
        FileError: the folder cannot be listed, or a name in it is not UTF-8.
    """
    store, path = _located(folder)
    start = len(path.rstrip("/")) + 1
    try:
        with _failing_with(f"cannot list {folder}"):
            infos = store.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
            names = [info.path[start:] for info in infos if info.type == fs.FileType.File]
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
    # A key may have characters that are invalid in a URI, so only the bucket is parsed as a URI.
    store, base = _opened(scheme, bucket)
    return store, f"{base.rstrip('/')}/{key}".rstrip("/")


@functools.lru_cache(maxsize=64)
def _opened(scheme: str, bucket: str) -> tuple[fs.FileSystem, str]:
    address = f"{scheme}://{bucket}"
    advice = "expected a folder, or a store of pyarrow or fsspec such as s3://bucket/folder"
    with _failing_with(f"cannot reach {shown(address)}", advice):
        if scheme == "s3":
            return _s3(), bucket
        uri = address if scheme in _BY_PYARROW else f"fsspec+{address}/"
        store, base = fs.FileSystem.from_uri(uri)
        return store, base


def _s3() -> fs.FileSystem:
    """Open S3 with the environment's endpoint; with a URI, pyarrow asks Amazon for the region."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # as in Amazon's own libraries
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if endpoint is None:
        return fs.S3FileSystem()
    scheme, mark, address = endpoint.partition("://")
    if not mark or scheme not in ("http", "https"):
        raise ValueError(f"the S3 endpoint is {shown(endpoint)}; expected http://… or https://…")
    return fs.S3FileSystem(scheme=scheme, endpoint_override=address.rstrip("/"))


@contextlib.contextmanager
def _failing_with(message: str, advice: str = "") -> Iterator[None]:
    """Raise an error of a store as a FileError: the message, the reason on one line, the advice."""
    try:
        yield
    except UnicodeDecodeError:
        raise
    except (OSError, ValueError, ImportError, ArrowException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror.partition(". Detail:")[0].partition("\n")[0]
        raise FileError("; ".join(filter(None, [f"{message}: {reason}", advice]))) from error
