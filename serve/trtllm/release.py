"""The TensorRT-LLM that is installed in this environment, and what that release can do.

Nothing here imports `tensorrt_llm`, so every refusal comes in a moment and in plain words; nor what
the library's own environment may lack.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from packaging.requirements import Requirement

from serve.contract.errors import UnavailableError

RELEASE = (1, 2)  # the last that compiles engines; what the checkpoint's names are for
API_RELEASE = (1, 3)  # the first whose PyTorch backend runs Whisper
WHISPER_MODEL = "_torch/models/modeling_whisper.py"  # in the package; early 1.3 lacks it
_MEND = (
    "use the image of deploy/images/trtllm.Dockerfile, which has 1.2.1, or build with "
    "build.runtime = 'native'"
)
_MEND_API = (
    "install a later TensorRT-LLM, name the python of an environment that has one in "
    "runtime.tensorrt_llm.python, or build with build.runtime = 'native'"
)


def library_version() -> str:
    """Return the installed TensorRT-LLM's version, which compiles engines; nothing is imported.

    Raises:
        UnavailableError: it is not installed, or not of release 1.2.
    """
    version, release = _installed("release 1.2", _MEND)
    if release > RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but from 1.3 on it neither compiles nor runs "
            "engines (trtllm-build and the engine executor were removed); expected 1.2; build "
            f"with build.runtime = 'tensorrt_llm_api', or {_MEND}"
        )
    if release != RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but its checkpoints have other tensor names; "
            f"expected 1.2; {_MEND}"
        )
    return version


def api_version() -> str:
    """Return the installed version, whose LLM API runs Whisper; nothing is imported.

    Raises:
        UnavailableError: it is not installed, older than 1.3, a 1.3 from before Whisper, or for
            another numpy.
    """
    version, release = _installed("release 1.3 or later", _MEND_API)
    if release < API_RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, whose LLM API has no Whisper; expected 1.3 or "
            f"later; build with build.runtime = 'tensorrt_llm', or {_MEND_API}"
        )
    spec = importlib.util.find_spec("tensorrt_llm")
    folders = spec.submodule_search_locations if spec is not None else None
    if not any((Path(folder) / WHISPER_MODEL).is_file() for folder in folders or []):
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but without {WHISPER_MODEL}: it is from before "
            f"its PyTorch backend got Whisper; {_MEND_API}"
        )
    _check_numpy(version)
    return version


def _check_numpy(version: str) -> None:
    """Refuse a library that was built for another numpy, whose import would end in a riddle.

    Raises:
        UnavailableError: its metadata asks for another numpy than is installed.
    """
    numpy = importlib.metadata.version("numpy")
    for line in importlib.metadata.requires("tensorrt_llm") or []:
        need = Requirement(line)
        if need.name == "numpy" and not need.specifier.contains(numpy, prereleases=True):
            raise UnavailableError(
                f"TensorRT-LLM {version} needs numpy{need.specifier}, but the environment of "
                f"{sys.executable} has {numpy}, as tritonserver's Python backend needs; name the "
                "python of an environment of its own in runtime.tensorrt_llm.python, such as that "
                "of NVIDIA's image tensorrt-llm/release"
            )


def installed_release() -> tuple[int, ...]:
    """Return major and minor version of the installed TensorRT-LLM, whichever it is.

    Raises:
        UnavailableError: it is not installed.
    """
    return _installed("release 1.2 or later", _MEND)[1]


def _installed(expected: str, mend: str) -> tuple[str, tuple[int, ...]]:
    """Return the installed version, as text and as (major, minor)."""
    try:
        version = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(
            f"TensorRT-LLM is not installed in the environment of {sys.executable}, expected "
            f"{expected}; {mend}"
        ) from error
    return version, tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
