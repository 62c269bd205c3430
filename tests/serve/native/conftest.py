"""The demo checkpoint, its engine in FP16, the windows of the bundled clips, and the kernels."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from build.checkpoint import open_checkpoint
from serve.contract.config import RuntimeConfig
from serve.native.runtime import NativeRuntime
from serve.speech.audio import decode
from serve.speech.cutting import cut
from serve.speech.meter import AudioLimits
from tests.checkpoints import write_engine
from tests.serve.native.decoding import features_of
from tests.serve.native.kernels.parity import ON_GPU

DATA = Path(__file__).parents[2] / "data"
DEMO = "tests/fixture/checkpoint"
# NumPy's own words about what kernels do knowingly, when the interpreter runs them.
NUMPY_WARNINGS = (
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:divide by zero encountered in (log|divide):RuntimeWarning",
)


def pytest_itemcollected(item):
    for warning in NUMPY_WARNINGS:
        item.add_marker(pytest.mark.filterwarnings(warning))
    if "kernels" in getattr(item, "fixturenames", ()) and item.config.getoption("--require-gpu"):
        item.add_marker(pytest.mark.gpu)  # elsewhere the interpreter runs them


@pytest.fixture(scope="session")
def checkpoint():
    return open_checkpoint(DEMO)


@pytest.fixture(scope="session")
def engine(checkpoint, tmp_path_factory):
    return write_engine(checkpoint, tmp_path_factory.mktemp("engines") / "demo-fp16", "fp16")


@pytest.fixture(scope="session")
def runtime(engine):
    """Four windows at a time, of twelve rows together."""
    runtime = NativeRuntime(engine, RuntimeConfig(slots=4, rows=12, encoder_batch=3, threads=1))
    yield runtime
    runtime.close()


@pytest.fixture(scope="session")
def windows():
    """Every window of every bundled clip: (clip, language, features)."""
    found = []
    for line in (DATA / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        blocks = decode((DATA / entry["file"]).read_bytes(), AudioLimits(3600))
        found += [
            (entry["file"], entry["language"] or "en", features_of(window.samples))
            for window in cut(blocks)
        ]
    return found


@pytest.fixture(scope="module")
def kernels():
    """The kernels' module; without a GPU they run in Triton's interpreter, which is slow."""
    if importlib.util.find_spec("triton") is None:
        pytest.fail(
            "triton is not installed; on a machine without a GPU: pip install triton==3.6.0"
        )
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads this when transformers imports it
        loaded = [n for n in sys.modules if n.split(".")[0] == "triton" and "._C" not in n]
        for name in loaded:
            del sys.modules[name]
    names = ("kernels.decoder", "rules.kernel", "kernels.encoder")
    return tuple(importlib.import_module(f"serve.native.{name}") for name in names)
