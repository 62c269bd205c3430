"""The demo checkpoint, its engine in FP16, and the windows of the bundled clips."""

import json
from pathlib import Path

import pytest

from build.checkpoint import open_checkpoint
from serve.speech.audio import decode
from serve.speech.windows import cut
from tests.checkpoints import write_engine
from tests.serve.native.decoding import features_of

DATA = Path(__file__).parents[2] / "data"
DEMO = "build/demo/checkpoint"


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(DEMO)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    return write_engine(checkpoint, tmp_path_factory.mktemp("engines") / "demo-fp16", "fp16")


@pytest.fixture(scope="module")
def windows():
    """Every window of every bundled clip: (clip, language, features)."""
    found = []
    for line in (DATA / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        samples = decode((DATA / entry["file"]).read_bytes(), 3600)
        found += [
            (entry["file"], entry["language"] or "en", features_of(window.samples))
            for window in cut(samples)
        ]
    return found
