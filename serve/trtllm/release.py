"""Check which release of TensorRT-LLM this environment has, and whether it supports Whisper.

Nothing here imports `tensorrt_llm`, so a check fails at once and with a clear message. Nothing
imports packages that the library's own environment may lack, either.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from packaging.requirements import Requirement

from serve.contract.errors import UnavailableError

RELEASE = (1, 2)  # the last release that compiles engines; checkpoints use its tensor names
API_RELEASE = (1, 3)  # the first release with Whisper in the PyTorch backend
WHISPER_MODEL = "_torch/models/modeling_whisper.py"  # in the package since 1.3.0rc25
_ADVICE = (
    "use the image of deploy/images/trtllm.Dockerfile, which has 1.2.1, or build with "
    "build.runtime = 'native'"
)
_ADVICE_API = (
    "install a later TensorRT-LLM, name the python of an environment that has one in "
    "runtime.tensorrt_llm.python, or build with build.runtime = 'native'"
)


def library_version() -> str:
    """Return the version of the installed TensorRT-LLM, which must compile engines.

    Raises:
        UnavailableError: it is not installed, or its release is not 1.2.
    """
    version, release = _installed("release 1.2", _ADVICE)
    if release != RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed; expected 1.2, the last release that has "
            "trtllm-build and the engine executor (1.3.0rc20 is the last candidate), and the one "
            "whose tensor names checkpoints use; build with build.runtime = 'tensorrt_llm_api' for "
            f"1.3 and later, or {_ADVICE}"
        )
    return version


def api_version() -> str:
    """Return the version of the installed TensorRT-LLM; its LLM API must run Whisper.

    Raises:
        UnavailableError: it is not installed, older than 1.3, an early 1.3 without Whisper, or
            needs another numpy.
    """
    version, release = _installed("release 1.3 or later", _ADVICE_API)
    spec = importlib.util.find_spec("tensorrt_llm")
    folders = (spec and spec.submodule_search_locations) or []
    if release < API_RELEASE or not any((Path(f) / WHISPER_MODEL).is_file() for f in folders):
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but its PyTorch backend has no Whisper "
            f"({WHISPER_MODEL}); expected 1.3.0rc25 or later; build with build.runtime = "
            f"'tensorrt_llm' for 1.2, or {_ADVICE_API}"
        )
    _check_numpy(version)
    return version


def _check_numpy(version: str) -> None:
    """Check numpy's version, since the import of the library would fail with an obscure error.

    Raises:
        UnavailableError: the library's metadata requires another numpy than the installed one.
    """
    numpy = importlib.metadata.version("numpy")
    for line in importlib.metadata.requires("tensorrt_llm") or []:
        requirement = Requirement(line)
        is_numpy = requirement.name == "numpy"
        if is_numpy and not requirement.specifier.contains(numpy, prereleases=True):
            raise UnavailableError(
                f"TensorRT-LLM {version} needs numpy{requirement.specifier}, but the environment "
                f"of {sys.executable} has {numpy}, as tritonserver's Python backend requires; set "
                "runtime.tensorrt_llm.python to the python of a separate environment, such as that "
                "of NVIDIA's image tensorrt-llm/release"
            )


def installed_release() -> tuple[int, ...]:
    """Return (major, minor) of the installed TensorRT-LLM, of any release.

    Raises:
        UnavailableError: it is not installed.
    """
    return _installed("release 1.2 or later", _ADVICE)[1]


def _installed(expected: str, advice: str) -> tuple[str, tuple[int, ...]]:
    """Return the installed version as text and as (major, minor).

    Raises:
        UnavailableError: the library is not installed.
    """
    try:
        version = importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(
            f"TensorRT-LLM is not installed in the environment of {sys.executable}, expected "
            f"{expected}; {advice}"
        ) from error
    return version, tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
