"""Which numpy Triton's Python backend was compiled for."""

import numpy as np
import pytest

from serve.contract.errors import UnavailableError
from serve.wire.numpy_version import require_numpy_1


def test_numpy_2_is_refused_before_the_start(monkeypatch):
    monkeypatch.setattr(np, "__version__", "1.26.4")
    require_numpy_1()
    for version in ("2.0.0", "2.1.0", "3.0", "10.0"):
        monkeypatch.setattr(np, "__version__", version)
        with pytest.raises(UnavailableError, match=rf"numpy {version} .*below 2"):
            require_numpy_1()
