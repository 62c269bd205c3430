"""Find tritonserver on this machine, and make the environment that it needs.

NVIDIA's images have it in /opt/tritonserver, ready to run. Elsewhere it comes from the wheel of
`nvidia-pytriton`, and needs:

- its Python backend folder with the stub for this Python, which the wheel has in another folder;
- the wheel's own libraries and libpython in LD_LIBRARY_PATH;
- this environment's `python3` first in PATH: the stub ignores PYTHONPATH and takes its packages
  from the environment of the first `python3` that it finds.
"""

import ctypes.util
import dataclasses
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from serve.contract.errors import UnavailableError

IMAGE = Path("/opt/tritonserver")
# Return the memory of large requests to the system when they are freed. By default the allocator
# raises both limits, to 32 and 64 MiB, and each arena keeps smaller blocks.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}


@dataclasses.dataclass(frozen=True)
class Installation:
    """The program and the folders of an installed tritonserver."""

    binary: Path
    backends: Path  # the folder of backends
    libraries: tuple[str, ...]  # folders for LD_LIBRARY_PATH

    def environment(self) -> dict[str, str]:
        """Return this process's environment with what the server needs put first."""
        return {
            **_ALLOCATOR,
            **os.environ,
            # For processes that the model starts with another interpreter.
            "EARSHOT_LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
            "LD_LIBRARY_PATH": _joined(self.libraries, "LD_LIBRARY_PATH"),
            "PATH": _joined((str(Path(sys.executable).parent),), "PATH"),
        }


def find_installation(folder: Path) -> Installation:
    """Find the server of NVIDIA's image, or else that of the wheel.

    Args:
        folder: the folder of the run; receives a folder of backends if the wheel is used.

    Raises:
        UnavailableError: there is no server, or a part of it or libpython is missing.
    """
    if (IMAGE / "bin" / "tritonserver").is_file():
        return Installation(IMAGE / "bin" / "tritonserver", IMAGE / "backends", ())
    wheel = _wheel()
    libraries = (str(wheel.parent / "nvidia_pytriton.libs"), _link_libpython(folder))
    binary = wheel / "tritonserver" / "bin" / "tritonserver"
    return Installation(binary, _link_backend(folder, wheel), libraries)


def _wheel() -> Path:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise UnavailableError(
            "Triton Inference Server is not installed: the wheel nvidia-pytriton is missing; "
            "install the packages of requirements.txt, as `make setup` does"
        )
    return Path(spec.origin).parent


def _link_backend(folder: Path, wheel: Path) -> Path:
    """Make a backend folder as Triton expects it, with the stub for this Python."""
    version = sysconfig.get_python_version()
    backend = wheel / "tritonserver" / "backends" / "python"
    stub = wheel / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    target = folder / "backends" / "python"
    target.mkdir(parents=True)
    sources = (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub)
    for source in sources:
        if not source.is_file():
            raise UnavailableError(
                f"{source} is missing; expected nvidia-pytriton with a stub for Python {version}"
            )
        (target / source.name).symlink_to(source)
    return target.parent


def _link_libpython(folder: Path) -> str:
    """Link libpython for the stub in a folder; return that, or "" if the loader finds libpython.

    The folder has only this link. The system's folder of libpython may have a cuDNN, too, and the
    loader would prefer it to PyTorch's.
    """
    version = sysconfig.get_python_version()
    name = f"libpython{version}.so.1.0"
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / name
    if library.is_file():
        target = folder / "libpython"
        target.mkdir(parents=True)
        (target / name).symlink_to(library)
        return str(target)
    if ctypes.util.find_library(f"python{version}"):
        return ""
    raise UnavailableError(
        f"{name} was not found, and Triton's Python backend needs it; install this Python's "
        f"shared library (on Debian and Ubuntu: libpython{version})"
    )


def _joined(first: tuple[str, ...], variable: str) -> str:
    return os.pathsep.join(filter(None, [*first, os.environ.get(variable)]))
