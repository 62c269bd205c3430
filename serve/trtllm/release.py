"""Check which release of TensorRT-LLM this environment has, and whether it supports Whisper.

Nothing here imports `tensorrt_llm`, so a check fails at once and with a clear message. Nothing
imports packages that the library's own environment may lack, either.
"""

import importlib.metadata
import sys

from packaging.requirements import Requirement
from packaging.version import Version

from serve.contract.errors import UnavailableError

RELEASE = (1, 2)  # the last release that compiles engines; checkpoints use its tensor names
API_RELEASE = (1, 3)  # the first release with Whisper in the PyTorch backend
_FIRST_WITH_WHISPER = Version("1.3.0rc25")
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
    version = _installed("release 1.2", _ADVICE)
    if version.release[:2] != RELEASE:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed; expected 1.2, the last release that has "
            "trtllm-build and the engine executor (1.3.0rc20 is the last candidate), and the one "
            "whose tensor names checkpoints use; build with build.runtime = 'tensorrt_llm_api' for "
            f"1.3 and later, or {_ADVICE}"
        )
    return str(version)


def api_version() -> str:
    """Return the version of the installed TensorRT-LLM; its LLM API must run Whisper.

    Raises:
        UnavailableError: it is not installed, older than 1.3, an early 1.3 without Whisper, or
            needs another numpy.
    """
    version = _installed("release 1.3 or later", _ADVICE_API)
    if version < _FIRST_WITH_WHISPER:
        raise UnavailableError(
            f"TensorRT-LLM {version} is installed, but its PyTorch backend has no Whisper; "
            f"expected {_FIRST_WITH_WHISPER} or later; build with build.runtime = 'tensorrt_llm' "
            f"for 1.2, or {_ADVICE_API}"
        )
    # With another numpy than required, the import of the library would fail with an obscure error.
    numpy = importlib.metadata.version("numpy")
    for requirement in map(Requirement, importlib.metadata.requires("tensorrt_llm") or []):
        if requirement.name == "numpy" and numpy not in requirement.specifier:
            raise UnavailableError(
                f"TensorRT-LLM {version} needs numpy{requirement.specifier}, but the environment "
                f"of {sys.executable} has {numpy}, as tritonserver's Python backend requires; set "
                "runtime.tensorrt_llm.python to the python of a separate environment, such as that "
                "of NVIDIA's image tensorrt-llm/release"
            )
    return str(version)


def installed_release() -> tuple[int, ...]:
    """Return (major, minor) of the installed TensorRT-LLM, of any release.

    Raises:
        UnavailableError: it is not installed.
    """
    return _installed("release 1.2 or later", _ADVICE).release[:2]


def _installed(expected: str, advice: str) -> Version:
    """Return the installed version.

    Raises:
        UnavailableError: the library is not installed.
    """
    try:
        return Version(importlib.metadata.version("tensorrt_llm"))
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(
            f"TensorRT-LLM is not installed in the environment of {sys.executable}, expected "
            f"{expected}; {advice}"
        ) from error
