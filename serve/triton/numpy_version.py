"""The numpy that Triton's Python backend works with; asked for by the launcher and the models."""

from serve.errors import UnavailableError


def require_numpy_1(version: str) -> None:
    """Refuse a numpy that Triton's Python backend was not compiled for.

    Raises:
        UnavailableError: it is 2 or later.
    """
    if int(version.split(".")[0]) >= 2:
        raise UnavailableError(
            f"numpy {version} is installed, and Triton Inference Server's Python backend was "
            "compiled for numpy 1: it would send garbled tensors; install numpy below 2"
        )
