import numpy as np
import pytest
import soundfile

from eval.config import EvaluationProduct
from eval.record import Run


@pytest.fixture
def record():
    """Writes silent audio of some seconds in the format of the file's name; gives its path."""

    def write(path, seconds=1.0):
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.zeros(int(8000 * seconds), dtype=np.float32), 8000)
        return path

    return write


@pytest.fixture
def run_of(tmp_path):
    """Makes the run of a command with its results in `tmp_path`."""

    def make(config=None, command="test", said=None):
        say = (lambda _: None) if said is None else said.append
        path = tmp_path / f"{command}.json"
        return Run(command, config or EvaluationProduct(), "x.toml", path, say=say, show=say)

    return make
