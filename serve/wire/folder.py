"""A run's own folder, and the names in it.

Of several engines each has a folder in it, with the sockets and signs of life of its Triton.

One is made for each start, mode 0700: the sockets in it are reached by its user alone. Whoever
made it holds a lock there for as long as it lives, so that the next start knows which folders
nobody will come back for.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONFIG = "config.toml"  # the whole configuration
GRPC_SOCKET = "grpc.sock"  # Triton appends a colon and the port: see `grpc_target`
GRPC_PORT = 1
METRICS_SOCKET = "metrics.sock"  # Triton's metrics, by HTTP, at /metrics
METRICS_PORT = 2
ALIVE = "alive"  # touched every second by the process that has the engine
FAILURE = "failure"  # why that process cannot go on, once it cannot
SUPERVISOR_PAGE = "supervisor.prom"  # what the supervisor adds to the metrics page

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "earshot-"
_LOCK = "lock"


def engine_folders(run: Path, count: int) -> tuple[Path, ...]:
    """Return the folder of each engine's sockets; a single engine has them in the run's own.

    Their names are different for all runs and engines: shared memory is named after them.
    """
    if count == 1:
        return (run,)
    return tuple(run / f"{run.name}-{number:03}" for number in range(count))


def reference_folder(run: Path) -> Path:
    """Return the folder of the sockets of the shadow monitor's reference; see `engine_folders`."""
    return run / f"{run.name}-shadow"


def gateway_door(run: Path, number: int = 0) -> Path:
    """Return the socket for health and metrics, by HTTP, of one of the gateway's processes."""
    return run / f"gateway-{number}.sock"


def gateway_alive(run: Path, number: int = 0) -> Path:
    """Return the file that the loop of one of the gateway's processes touches every second."""
    return run / f"alive_gateway-{number}"


def grpc_target(folder: Path) -> str:
    """Return the target of a gRPC channel to the Triton of this folder."""
    return f"unix:{folder / GRPC_SOCKET}:{GRPC_PORT}"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make a run's folder, for the length of a `with` block; nothing of it is left afterwards.

    Removes first what runs left behind that could not do so themselves.
    """
    parent = Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # Locked before it has its name: nobody can find it there and take it.
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "new").rename(folder / _LOCK)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def shared_memory(folder: Path) -> list[Path]:
    """List the shared-memory regions of a run, or of one of its engines."""
    return list(SHARED_MEMORY.glob(f"{folder.name}*"))


def remove_shared_memory(folder: Path) -> None:
    """Remove these regions; none of the processes lives that had them."""
    for region in shared_memory(folder):
        region.unlink(missing_ok=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's runs that ended without doing it, as by SIGKILL."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or never ours
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody has it
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
