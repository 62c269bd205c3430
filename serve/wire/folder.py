"""The folder of a run, and the names of the files in it.

Each Triton of a run has a subfolder with its sockets and its heartbeat. Each device has a symbolic
link to the subfolder of the Triton that gets its requests; without the link, requests wait. While a
gateway sends requests to a Triton or waits for its answers, it holds a lock on the subfolder. A
replaced Triton ends when no gateway holds its subfolder any more.

Each start makes a new folder of mode 0700, so that only its user reaches the sockets. The process
that made the folder holds a lock in it while it lives. The next start removes folders that no
process holds.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONFIG = "config.toml"  # the whole configuration
GRPC_SOCKET = "grpc.sock"  # Triton appends a colon and the port; see `grpc_target`
GRPC_PORT = 1
METRICS_SOCKET = "metrics.sock"  # Triton's metrics, by HTTP, at /metrics
METRICS_PORT = 2
ALIVE = "alive"  # the heartbeat of the engine's process
FAILURE = "failure"  # why the engine's process has failed
SUPERVISOR_PAGE = "supervisor.prom"  # the supervisor's metrics
USED = "used"  # touched while there are requests, if idle engines may be unloaded
SIGNING_KEY = "signing.key"  # the secret of `signing_key`
CONTROL = "control.sock"  # for reload requests; see `serve.supervisor.control`

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "earshot-"
_LOCK = "lock"
_SIGNING_BYTES = 32


def engine_links(run: Path, count: int) -> tuple[Path, ...]:
    """Return each device's link to the folder of the Triton that gets its requests."""
    return tuple(run / f"engine-{number}" for number in range(count))


def triton_folder(run: Path, number: int) -> Path:
    """Return the folder of a run's Triton by its number.

    The names of all runs and Tritons differ, and no name is a prefix of another, because shared
    memory is named after them.
    """
    return run / f"{run.name}-{number:05}"


def hold(folder: Path) -> int:
    """Lock a Triton's folder for sending requests; closing the returned descriptor unlocks it.

    Raises:
        OSError: the folder was removed, or is being removed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(folder: Path) -> bool:
    """Return whether any gateway holds a Triton's folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def runs() -> Iterator[Path]:
    """Yield the folders of this user's runs; some may have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, or owned by another user
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                yield folder


def reference_folder(run: Path) -> Path:
    """Return the folder of the sockets of the shadow monitor's reference; see `engine_links`."""
    return run / f"{run.name}-shadow"


def gateway_socket(run: Path, number: int = 0) -> Path:
    """Return the HTTP socket of a gateway process for health and metrics."""
    return run / f"gateway-{number}.sock"


def gateway_alive(run: Path, number: int = 0) -> Path:
    """Return the heartbeat file of a gateway process."""
    return run / f"alive_gateway-{number}"


def signing_key(run: Path) -> bytes:
    """Return the signing secret of a run's gateways; the first call makes it."""
    path = run / SIGNING_KEY
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=run) as new:  # mode 0600
            new.write(secrets.token_bytes(_SIGNING_BYTES))
            new.flush()
            with contextlib.suppress(FileExistsError):  # another gateway made it first
                os.link(new.name, path)
    return path.read_bytes()


def grpc_target(folder: Path) -> str:
    """Return the target of a gRPC channel to the Triton of this folder."""
    return f"unix:{folder / GRPC_SOCKET}:{GRPC_PORT}"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make the folder of a run for a `with` block, and remove it afterwards.

    Remove abandoned folders of other runs first.
    """
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Lock it before it gets its name, so that no other start removes it.
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "new").rename(folder / _LOCK)
        yield folder
    finally:
        remove_triton(folder)
        os.close(lock)


def shared_memory(folder: Path) -> list[Path]:
    """List the shared-memory regions of a run or of a Triton."""
    return list(SHARED_MEMORY.glob(f"{folder.name}*"))


def remove_shared_memory(folder: Path) -> None:
    """Remove the shared-memory regions of a run or of a Triton that has ended."""
    for region in shared_memory(folder):
        region.unlink(missing_ok=True)


def _remove_abandoned() -> None:
    """Remove the folders of this user's killed runs."""
    for folder in runs():
        with contextlib.suppress(OSError):  # removed meanwhile, or in use
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_triton(folder)
            finally:
                os.close(lock)


def remove_triton(folder: Path) -> None:
    """Remove a Triton's folder and shared memory after its processes have ended."""
    remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
