"""Checkpoints and engines with small files that are made to break the build."""

import json
import shutil
import subprocess
import sys
import tracemalloc

import pytest

from build.__main__ import main
from tests.checkpoints import write_engine

DEEP = b"[" * 1_000_000
MANY_BYTES = 100e6  # more than any of the files may cost


def set_key(key, value):
    """Replace a key's value by JSON as it is written."""

    def change(text):
        content = json.loads(text) | {key: "here"}
        return json.dumps(content).replace('"here"', value).encode()

    return change


def tokens(entry):
    return set_key("added_tokens", f"[{entry}]")


HOSTILE = [
    ("config.json", set_key("encoder_layers", "1000000000"), "n_audio_layer = 1000000000"),
    ("config.json", set_key("d_model", "1" + "0" * 5000), "not valid JSON"),
    ("config.json", set_key("model_type", f'"{"x" * 100_000}"'), "model_type = 'xxx"),
    ("config.json", lambda text: DEEP, "not valid JSON"),
    ("config.json", lambda text: b" " * 2**20 + text, "more than 1,048,576 bytes"),
    ("generation_config.json", set_key("suppress_tokens", "[1e999]"), "suppress_tokens[0] = "),
    ("tokenizer.json", lambda text: b" " * 2**24 + text, "more than 16,777,216 bytes"),
    ("tokenizer.json", tokens("7"), "is not a tokenizer"),
]


@pytest.mark.parametrize(("name", "change", "says"), HOSTILE)
def test_a_hostile_file_of_a_checkpoint_is_named(folder, tmp_path, capsys, name, change, says):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    arguments = ["engine", "--checkpoint", str(folder), "--engine", str(tmp_path / "engine")]
    tracemalloc.start()
    try:
        assert main([*arguments, "--no-verify"]) == 1
        assert tracemalloc.get_traced_memory()[1] < MANY_BYTES
    finally:
        tracemalloc.stop()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and len(error) < 1000
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: DEEP, "not JSON"),
        (lambda text: b" " * 2**24 + text, "at most 16,777,216"),
        (set_key("runtime_options", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), "not JSON"),
        (set_key("dims", '{"n_mels": 1e999}'), "dims"),
    ],
)
def test_a_hostile_engine_json_is_refused(checkpoint, tmp_path, capsys, change, says):
    engine = tmp_path / "engine"
    write_engine(checkpoint, engine)
    path = engine / "engine.json"
    path.write_bytes(change(path.read_bytes()))
    capsys.readouterr()
    assert main(["inspect", str(engine)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and len(error) < 1000


def test_a_name_that_is_not_utf_8_is_refused(folder):
    name = folder.parent / "\udcff"
    shutil.copytree(folder, name)
    command = [sys.executable, "-m", "build", "engine", "--checkpoint", str(name)]
    done = subprocess.run(
        [*command, "--engine", str(folder.parent / "engine"), "--no-verify"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b"is not UTF-8" in done.stderr) == (2, True)
