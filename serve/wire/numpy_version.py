"""Check the numpy version for Triton's Python backend."""

import numpy as np

from serve.contract.errors import UnavailableError


def require_numpy_1() -> None:
    """Reject a numpy version that Triton's Python backend was not compiled for.

    Raises:
        UnavailableError: the version is 2 or later.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        raise UnavailableError(
            f"numpy {np.__version__} is installed; expected numpy 1, for which Triton Inference "
            "Server's Python backend was compiled: it would corrupt tensors; install numpy below 2"
        )
