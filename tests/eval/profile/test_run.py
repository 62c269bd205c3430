"""The command over an engine of a tiny shape with random weights, and timelines by hand."""

import gzip
import json

import pytest

from eval.__main__ import main
from eval.profile import timeline_of
from eval.random_whisper import PUBLISHED
from serve.native.stopwatch import Stopwatch
from tests.eval.bench.conftest import TINY


def test_a_load_is_profiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "large-v3-turbo", TINY)
    config = tmp_path / "tiny.toml"
    config.write_text(
        'name = "tiny"\n[build]\ncheckpoint = "openai/whisper-large-v3-turbo"\n'
        "[runtime]\nslots = 2\nthreads = 1\n[transcriber]\nmax_tokens = 6\n"
    )
    flags = "--clips tests/data/manifest.jsonl --requests 2 --at-once 1 --words --random-weights"
    arguments = f"profile --config {config} {flags} --output {tmp_path}/out"
    assert main(arguments.split()) == 0
    assert Stopwatch.ranges is None
    printed = capsys.readouterr().out
    assert "| encode" in printed and "aten::" not in printed and "of audio" in printed
    figures = json.loads((tmp_path / "out" / "profile.json").read_text())["figures"]
    phases = {phase["name"]: phase for phase in figures["phases"]}
    assert {"encode", "prompts", "steps", "words"} < phases.keys()
    assert all(phase["busy_s"] > 0 for name, phase in phases.items() if name != "between")
    assert 0 < figures["busy_s"] <= figures["seconds"]
    assert '<section id="kernels">' in (tmp_path / "out" / "report.html").read_text()
    with gzip.open(tmp_path / "out" / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"load", "encode", "prompts", "steps", "words"} <= names


# ---------------------------------------------------------------- timeline


LOAD = ("user_annotation", "load", 0, 1000, 1)


def event(kind, name, begin, duration, thread, correlation=None):
    return {
        **{"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration},
        **{"pid": 7, "tid": thread, "args": {"correlation": correlation}},
    }


def timeline(*events):
    metadata = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}
    return timeline_of([metadata, *(event(*one) for one in (LOAD, *events))])


def test_kernels_belong_to_the_phase_that_launched_them():
    found = timeline(
        ("user_annotation", "encode", 100, 50, 2),
        ("user_annotation", "steps", 200, 100, 2),
        ("cuda_runtime", "cudaLaunchKernel", 110, 5, 2, 1),
        ("cuda_runtime", "cudaGraphLaunch", 210, 5, 2, 2),
        ("cuda_runtime", "cudaMemcpyAsync", 160, 5, 2, 3),
        ("kernel", "gemm", 120, 200, "stream 7", 1),  # it ends in steps
        ("kernel", "attention", 330, 50, "stream 7", 2),  # after steps
        ("kernel", "attention", 380, 20, "stream 7", 2),
        ("gpu_memcpy", "Memcpy", 340, 10, "stream 9", 3),  # beside it
        ("kernel", "before the load", -50, 10, "stream 7", 2),
        ("cpu_op", "aten::mm", 105, 20, 2),  # the host's
    )
    kernels = {(k.name, k.phase): (k.calls, round(1e6 * k.seconds)) for k in found.kernels}
    assert kernels == {
        ("gemm", "encode"): (1, 200),
        ("attention", "steps"): (2, 70),
        ("Memcpy", "between"): (1, 10),
    }
    assert found.kernels[0].name == "gemm"
    busy = {phase.name: round(1e6 * phase.busy_s) for phase in found.phases}
    assert busy == {"encode": 200, "steps": 70, "between": 0}, "the copy is beside a kernel"
    assert (found.seconds, found.busy_s) == (pytest.approx(1e-3), pytest.approx(270e-6))


def test_idle_time_belongs_to_the_phase_at_its_begin():
    found = timeline(
        ("user_annotation", "steps", 90, 810, 2),
        ("cuda_runtime", "cudaLaunchKernel", 95, 5, 2, 1),
        ("kernel", "one", 100, 100, "stream 7", 1),
        ("kernel", "two", 150, 250, "stream 7", 1),
        ("kernel", "three", 700, 200, "stream 7", 1),
    )
    idle = {phase.name: round(1e6 * phase.idle_s) for phase in found.phases}
    assert idle == {"steps": 300, "between": 200}


def test_on_a_cpu_operators_count_without_those_that_they_call():
    found = timeline(
        ("user_annotation", "encode", 100, 400, 2),
        ("cpu_op", "aten::linear", 100, 300, 2),
        ("cpu_op", "aten::addmm", 110, 200, 2),
        ("cpu_op", "aten::copy_", 120, 50, 2),
        ("cpu_op", "aten::addmm", 320, 40, 2),
        ("cpu_op", "aten::stft", 600, 100, 2),
        ("cpu_op", "aten::mm", 100, 900, 3),  # of a thread that has no phase
    )
    own = {(k.name, k.phase): (k.calls, round(1e6 * k.seconds)) for k in found.kernels}
    assert own == {
        ("aten::linear", "encode"): (1, 60),
        ("aten::addmm", "encode"): (2, 190),
        ("aten::copy_", "encode"): (1, 50),
        ("aten::stft", "between"): (1, 100),
    }
    assert found.busy_s == pytest.approx(400e-6)
