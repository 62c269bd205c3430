"""A run's own folder, and the names in it.

Each Triton of a run has a folder in it, with its sockets and signs of life, and each device a link
to the folder of the one that is given its requests. While there is no link they wait. A gateway
holds the folder of each Triton that it may give requests to or waits for answers of; one that has
been replaced ends once nobody does.

One is made for each start, mode 0700: the sockets in it are reached by its user alone. Whoever
made it holds a lock there for as long as it lives, so that the next start knows which folders
nobody will come back for.
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
GRPC_SOCKET = "grpc.sock"  # Triton appends a colon and the port: see `grpc_target`
GRPC_PORT = 1
METRICS_SOCKET = "metrics.sock"  # Triton's metrics, by HTTP, at /metrics
METRICS_PORT = 2
ALIVE = "alive"  # touched every second by the process that has the engine
FAILURE = "failure"  # why that process cannot go on, once it cannot
SUPERVISOR_PAGE = "supervisor.prom"  # what the supervisor adds to the metrics page
USED = "used"  # touched when requests come, wait or are under way, where engines may be unloaded
SIGNING_KEY = "signing.key"  # by which the run's gateways sign; see `signing_key`
CONTROL = "control.sock"  # where the supervisor takes orders; see `serve.supervisor.control`

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "earshot-"
_LOCK = "lock"
_SIGNING_BYTES = 32


def engine_links(run: Path, count: int) -> tuple[Path, ...]:
    """Return the link of each device to the folder of its engine's Triton."""
    return tuple(run / f"engine-{number}" for number in range(count))


def triton_folder(run: Path, number: int) -> Path:
    """Return the folder of the Triton that is the run's first, second and so on.

    Their names are different for all runs and Tritons, and none begins with another: shared memory
    is named after them.
    """
    return run / f"{run.name}-{number:05}"


def hold(folder: Path) -> int:
    """Hold a Triton's folder as one who gives it requests; return a descriptor that lets go.

    Raises:
        OSError: it has gone, or is about to.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_held(folder: Path) -> bool:
    """Tell whether anybody holds a Triton's folder."""
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
        with contextlib.suppress(OSError):  # gone meanwhile, or never ours
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                yield folder


def reference_folder(run: Path) -> Path:
    """Return the folder of the sockets of the shadow monitor's reference; see `engine_links`."""
    return run / f"{run.name}-shadow"


def gateway_door(run: Path, number: int = 0) -> Path:
    """Return the socket for health and metrics, by HTTP, of one of the gateway's processes."""
    return run / f"gateway-{number}.sock"


def gateway_alive(run: Path, number: int = 0) -> Path:
    """Return the file that the loop of one of the gateway's processes touches every second."""
    return run / f"alive_gateway-{number}"


def signing_key(run: Path) -> bytes:
    """Return the secret by which all gateways of a run sign; the first to ask makes it."""
    path = run / SIGNING_KEY
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=run) as new:  # mode 0600
            new.write(secrets.token_bytes(_SIGNING_BYTES))
            new.flush()
            with contextlib.suppress(FileExistsError):  # another gateway was first
                os.link(new.name, path)
    return path.read_bytes()


def grpc_target(folder: Path) -> str:
    """Return the target of a gRPC channel to the Triton of this folder."""
    return f"unix:{folder / GRPC_SOCKET}:{GRPC_PORT}"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make a run's folder, for the length of a `with` block; nothing of it is left afterwards.

    Removes first what runs left behind that could not do so themselves.
    """
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Locked before it has its name: nobody can find it there and take it.
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "new").rename(folder / _LOCK)
        yield folder
    finally:
        remove_triton(folder)
        os.close(lock)


def shared_memory(folder: Path) -> list[Path]:
    """List the shared-memory regions of a run, or of one of its Tritons."""
    return list(SHARED_MEMORY.glob(f"{folder.name}*"))


def remove_shared_memory(folder: Path) -> None:
    """Remove these regions; none of the processes lives that had them."""
    for region in shared_memory(folder):
        region.unlink(missing_ok=True)


def _remove_abandoned() -> None:
    """Remove the folders of this user's runs that ended without doing it, as by SIGKILL."""
    for folder in runs():
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody has it
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody has it
        remove_triton(folder)
    finally:
        os.close(lock)


def remove_triton(folder: Path) -> None:
    """Remove a Triton's folder and its shared memory; none of its processes lives."""
    remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
