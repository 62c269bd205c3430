"""The command as a user has it, on Ray: every file once, whatever is killed."""

import collections
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from pyarrow import parquet

from eval.processes import kill
from serve.cli.main import main
from serve.supervisor.server import config_to_toml
from tests.serving import audio_file
from tests.waits import wait_until

pytestmark = pytest.mark.nightly

WAIT_S = 180
SHARDS = 20


@pytest.fixture(scope="module")
def ray_folder():
    """The folder of Ray's sockets, which need short names; at the end no part of Ray runs."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    wait_until(lambda: not running(folder), "processes of Ray are left")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(ray_folder):
    """Two nodes; see `nodes`."""
    environment = {**os.environ, "RAY_TMPDIR": ray_folder}
    environment["RAY_AUTH_MODE"] = "disabled"  # whatever token this user has
    with subprocess.Popen(
        [sys.executable, "-m", "tests.serve.bulk.nodes", "2"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield Nodes(process, said(process, "address").split()[1])
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
            kill(running(ray_folder))


@dataclasses.dataclass(frozen=True)
class Nodes:
    process: subprocess.Popen
    address: str

    def kill_one(self):
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        said(self.process, "killed")


def said(process, word):
    """The line that begins with a word; what Ray says besides is passed over."""
    line = next((line for line in process.stdout if line.startswith(word)), None)
    assert line, f"the cluster ended without {word}"
    return line


@pytest.fixture(scope="module")
def count(pytestconfig):
    """How many files there are, of which the last two are no audio."""
    return pytestconfig.getoption("--bulk-files")


@pytest.fixture(scope="module")
def command(nano_config, ray_folder, tmp_path_factory, count):
    """Starts the command on the files."""
    folder = tmp_path_factory.mktemp("bulk")
    clip = audio_file(1.0)
    (folder / "in").mkdir()
    for number in range(count):
        content = b"no audio" if number >= count - 2 else clip
        (folder / "in" / f"{number}.wav").write_bytes(content)
    toml = folder / "nano.toml"
    toml.write_text(config_to_toml(nano_config()), encoding="utf-8")

    @contextlib.contextmanager
    def start(output, *arguments):
        words = ["--config", toml, "--input", folder / "in", "--output", output]
        words += ["--shard-files", count // SHARDS, *arguments]
        environment = {**os.environ, "RAY_TMPDIR": ray_folder}
        if "--address" in arguments:
            environment["RAY_AUTH_MODE"] = "disabled"  # as the cluster's
        run = subprocess.Popen(
            [sys.executable, "-m", "serve", "bulk", *map(str, words)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield run
        finally:
            run.kill()
            run.communicate(timeout=WAIT_S)

    return start


def running(folder):
    """Processes that were started to have their files in a folder of Ray's."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another's
            if process.environ().get("RAY_TMPDIR") == folder:
                found.add(process)
    return found


def shards(output):
    return sorted((output / "transcripts").glob("[0-9]*"))


def check_every_file_once(files, count):
    expected = {f"{number}.wav" for number in range(count)}
    assert collections.Counter(Path(file).name for file in files) == dict.fromkeys(expected, 1)


def names(path):
    return [json.loads(line)["file"] for line in path.read_text().splitlines()]


def test_a_node_that_is_killed_half_way_loses_no_file_and_doubles_none(
    cluster, command, count, tmp_path
):
    with command(tmp_path, "--address", cluster.address) as run:
        wait_until(lambda: len(shards(tmp_path)) >= 4, "nothing is done", WAIT_S + count)
        cluster.kill_one()
        assert len(shards(tmp_path)) < SHARDS  # or this would prove nothing
        _, errors = run.communicate(timeout=WAIT_S + count)
    assert run.returncode == 1, errors
    assert "Traceback" not in errors
    assert f"2 of {count} files failed; see {tmp_path}/failed.jsonl" in errors
    failed = names(tmp_path / "failed.jsonl")
    assert [Path(file).name for file in failed] == [f"{count - 2}.wav", f"{count - 1}.wav"]
    check_every_file_once(
        [*failed, *(file for shard in shards(tmp_path) for file in names(shard))], count
    )


def test_a_run_here_that_is_killed_goes_on_where_it_ended(command, count, ray_folder, tmp_path):
    before = running(ray_folder)
    with command(tmp_path, "--format", "parquet", "--cpus", "1") as run:
        wait_until(lambda: len(shards(tmp_path)) >= 4, "nothing is done", WAIT_S + count)
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=WAIT_S)
    wait_until(
        lambda: running(ray_folder) <= before,
        "what the run started outlives it",
        2 * WAIT_S,  # Ray notices a head that is gone by what does not come for half a minute
    )
    done = {path: path.stat().st_mtime_ns for path in shards(tmp_path)}
    assert len(done) < SHARDS
    with command(tmp_path, "--format", "parquet", "--cpus", "1") as run:
        _, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 1, errors
    assert f"{SHARDS} shards, {len(done)} of them done" in errors
    assert {path: path.stat().st_mtime_ns for path in done} == done
    heard = parquet.read_table(tmp_path / "transcripts").column("file").to_pylist()
    check_every_file_once([*heard, *names(tmp_path / "failed.jsonl")], count)


def test_sigterm_ends_a_run_as_ctrl_c_does(command, count, ray_folder, tmp_path):
    before = running(ray_folder)
    with command(tmp_path, "--cpus", "1") as run:
        wait_until(lambda: len(shards(tmp_path)) >= 2, "nothing is done", WAIT_S + count)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130, errors
    assert errors.endswith("the same command continues with the rest\ninterrupted\n"), errors
    assert "Traceback" not in errors
    wait_until(lambda: running(ray_folder) <= before, "what the run started outlives it", WAIT_S)
    assert 2 <= len(shards(tmp_path)) < SHARDS
    assert all(names(path) for path in shards(tmp_path))  # whole lines of JSON
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]  # no part of a file


@pytest.mark.parametrize(
    "address, status, message",
    [
        ("nonsense", 2, "--address nonsense; expected HOST:PORT; start a cluster with"),
        ("127.0.0.1:1", 1, "no Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused"),
    ],
)
def test_an_address_without_a_cluster_is_told_at_once(tmp_path, capsys, address, status, message):
    (tmp_path / "a.wav").touch()
    (tmp_path / "some.toml").write_text("")
    words = ["--config", tmp_path / "some.toml", "--input", tmp_path, "--output", tmp_path / "out"]
    assert main(["bulk", *map(str, words), "--address", address]) == status
    assert f"error: {message}" in capsys.readouterr().err
