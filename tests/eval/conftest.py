import numpy as np
import pytest
import soundfile


@pytest.fixture
def record():
    """Writes silent audio of some seconds in the format of the file's name; gives its path."""

    def write(path, seconds=1.0):
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.zeros(int(8000 * seconds), dtype=np.float32), 8000)
        return path

    return write
