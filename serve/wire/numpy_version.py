"""The release of numpy that tensors need on their way through Triton's Python backend."""

import numpy as np

from serve.contract.errors import UnavailableError


def require_numpy_1() -> None:
    """Refuse a numpy that Triton's Python backend was not compiled for.

    Raises:
        UnavailableError: it is 2 or later.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        raise UnavailableError(
            f"numpy {np.__version__} is installed, and Triton Inference Server's Python backend "
            "was compiled for numpy 1: it would send garbled tensors; install numpy below 2"
        )
