"""One run of the bench: what it refuses, in which order it measures, what it keeps."""

import contextlib
import dataclasses
import importlib.util
import json
import re

import pytest
import torch

from eval.__main__ import main
from eval.bench import run
from eval.bench.run import FULL, bench, configured, measurements
from eval.bench.table import Measurement
from eval.random_whisper import PUBLISHED
from eval.record import Run
from serve.contract.engine import open_engine
from serve.contract.errors import FileError
from serve.native.runtime import NativeRuntime
from tests.eval.bench.conftest import PLAN, TINY, quiet


@pytest.fixture
def measured(config, tmp_path, monkeypatch):
    """Runs the bench of the plan with given measurements."""

    def measured(measurements, path=tmp_path / "deeper" / "bench.json"):
        monkeypatch.setattr(run, "check", lambda *given: None)
        monkeypatch.setattr(run, "measurements", lambda *given: measurements)
        lines, flags = [], dict(vars(PLAN))
        of = Run("bench", config, "x.toml", path, flags=flags, say=lines.append, show=lines.append)
        with contextlib.suppress(KeyboardInterrupt):
            bench(of, **flags)
        return json.loads(path.read_text()), lines

    return measured


def test_what_was_measured_before_an_interruption_is_kept(measured):
    def interrupted():
        yield Measurement("latency", "earshot, 2 slots", 20.0, "ms", 5.0)
        raise KeyboardInterrupt

    kept, lines = measured(interrupted())
    assert kept["figures"]["complete"] is False and kept["figures"]["rows"][0]["value"] == 20.0
    assert kept["config"] == "large-v3-turbo" and kept["versions"]["torch"] == torch.__version__
    assert kept["settings"]["runtime"]["slots"] == 2 and kept["settings"]["seconds"] == 0.05
    assert lines[-1].startswith("latency; earshot, 2 slots: 20 ms")


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(measured, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"^cannot write .*bench\.json: (Not a dir|File exists)"):
        measured(None, tmp_path / "file" / "bench.json")


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        ("--config configs/demo.toml", 'bench needs runtime.device = "cuda"', 2),
        ("--workloads a,latency,x", "unknown workloads: a, x; known: start, throughput, words", 2),
        ("--peers nobody", "unknown peers: nobody; known: ", 2),
        ("", "torch sees 0 CUDA devices here", 1),
        ("", "left out: the peer faster-whisper needs ctranslate2, transformers; install it", 1),
        ("--peers=vllm", "the peer vllm needs vllm, transformers; install it, or leave", 1),
        ("--through-server --peers=", "--through-server needs the packages pytriton, ", 1),
        ("--device cuda:*", "--device needs the packages pytriton, ", 1),
    ],
)
def test_what_cannot_run_is_refused_at_once(flags, message, code, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no package of others
    line = ["bench", "--config", "configs/large-v3-turbo.toml", *flags.split()]
    assert main(line) == code
    assert message in capsys.readouterr().err


def test_the_command_ends_with_a_table_and_keeps_the_rows(config, capsys, monkeypatch, tmp_path):
    def through_server(config, folder, plan, say):
        assert open_engine(folder).manifest.dims == TINY.dims and plan.requests == 2
        yield Measurement("throughput of server", "x", 1.0, "RTFx")

    def measure_peer(name, shape, device, seconds, say):
        assert (name, shape, device, seconds) == ("one", TINY, "cpu", 1)
        yield Measurement("throughput of one", "x", 1.0, "RTFx")

    monkeypatch.setattr("eval.__main__.load_config", lambda path: config)
    monkeypatch.setattr(run, "check", lambda *given: None)
    monkeypatch.setitem(PUBLISHED, "large-v3-turbo", TINY)
    monkeypatch.setattr(run, "measure_peer", measure_peer)
    monkeypatch.setattr("eval.bench.server.through_server", through_server)
    flags = f"--config x --output {tmp_path} --workloads start,latency --slots 2 --requests 2"
    assert main(["bench", *flags.split(), "--seconds=1", "--peers=one", "--through-server"]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["figures"]["rows"]
    names = ["start", "opening", "latency", "throughput of server", "throughput of one"]
    assert [row["workload"] for row in rows] == [*["ceiling"] * 3, *names]
    ceilings = ["matrix product", "attention", "copy, read + write"]  # a CPU has no FP8
    assert [row["system"] for row in rows[:3]] == ceilings
    assert all(row["value"] > 0 for row in rows)
    assert "| latency | " in re.sub(" +", " ", capsys.readouterr().out)


@pytest.mark.nightly
def test_every_variant_of_an_ablation_is_measured_or_refused(config):
    plan = dataclasses.replace(PLAN, workloads=(), ablate=True, seconds=0.01, requests=1)
    rows = measurements(TINY, config, plan, quiet)
    values = {(row.system, row.workload): row.value for row in rows}
    assert values["cuda_graph true", "ablation, opening"] is None  # there is no GPU
    for name in (FULL, "kernels torch, cuda_graph false", "weights fp16"):
        assert values[name, "ablation, throughput"] > 0
        assert values[name, "ablation, latency"] > 0


@pytest.mark.nightly
def test_a_beam_gives_every_slot_its_rows_and_is_what_the_windows_are_decoded_with(
    config, monkeypatch
):
    sizes, submit = set(), NativeRuntime.submit

    def noting(self, job):
        sizes.add(job.options.beam_size)
        submit(self, job)

    monkeypatch.setattr(NativeRuntime, "submit", noting)
    plan = dataclasses.replace(PLAN, workloads=("throughput",), slots=(2,), beam_size=3)
    row = list(measurements(TINY, configured(config, plan), plan, quiet))[-1]
    assert (row.workload, row.system) == ("throughput", "earshot, 2 slots, beam 3")
    assert sizes == {3}
