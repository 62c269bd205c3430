import numpy as np
import pytest
import soundfile

from eval.config import EvaluationProduct
from eval.record import Run, write_jsonl
from serve.speech.rate import SAMPLE_RATE


@pytest.fixture
def record():
    """Writes a tone of some seconds in the format of the file's name; gives its path."""

    def write(path, seconds=1.0):
        path.parent.mkdir(parents=True, exist_ok=True)
        tone = 0.1 * np.sin(np.arange(round(SAMPLE_RATE * seconds)) * 0.2)
        soundfile.write(path, tone.astype(np.float32), SAMPLE_RATE)
        return path

    return write


@pytest.fixture
def manifest(tmp_path, record):
    """Writes clips with these fields, named 0.wav and so on; gives the path of their manifest."""

    def write(*clips):
        lines = []
        for number, fields in enumerate(clips):
            line = {"file": f"{number}.wav", "text": f"text {number}", "language": "en"}
            line |= {"duration": 1.0, **fields}
            record(tmp_path / line["file"], line["duration"])
            lines.append(line)
        write_jsonl(tmp_path / "manifest.jsonl", lines)
        return str(tmp_path / "manifest.jsonl")

    return write


@pytest.fixture
def run_of(tmp_path):
    """Makes the run of a command with its results in `tmp_path`."""

    def make(config=None, command="test", said=None):
        say = (lambda _: None) if said is None else said.append
        path = tmp_path / f"{command}.json"
        return Run(command, config or EvaluationProduct(), "x.toml", path, say=say, show=say)

    return make
