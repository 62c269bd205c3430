"""The native runtime in a process of its own: it says what it says in this process, and its end is
noticed on either side."""

import dataclasses
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import mel_filters, open_engine
from serve.contract.errors import DeviceError, OptionError, UnavailableError
from serve.contract.phrases import build_trie
from serve.native.process import ProcessRuntime
from serve.native.runtime import NativeRuntime
from serve.speech.features import HOP_LENGTH, LogMel
from serve.transcriber.active import encoder_frames
from tests.runtimes import SLOTS, run, samples_job
from tests.waits import WAIT_S

CONFIG = RuntimeConfig(slots=SLOTS, rows=8, encoder_batch=1, threads=1)


@pytest.fixture(scope="module")
def engine(nano_engine):
    return open_engine(nano_engine)


@pytest.fixture(scope="module")
def job(engine):
    return samples_job(engine)


@pytest.fixture(scope="module")
def runtime(engine):
    runtime = ProcessRuntime(engine, CONFIG)
    yield runtime
    runtime.close()


def process_of(parent=None):
    """The process of the runtime that this one or another has opened last."""
    children = psutil.Process(parent).children(recursive=True)
    return [child for child in children if "serve.native import process" in str(child.cmdline())][
        -1
    ]


def test_every_option_and_every_part_of_an_answer_passes(engine, job, runtime):
    here, log_mel = NativeRuntime(engine, CONFIG), LogMel(mel_filters(80), torch.device("cpu"))
    tries = [build_trie([((7, 8, 9), 4.0)]), build_trie([((5, 6), 30.0), ((5, 9), 2.0)])]
    options = [{}, {"phrases": tries[0]}, {"phrases": tries[1], "beam_size": 3}]
    options += [{"temperature": 0.8, "seed": 3, "best_of": 2}, {"beam_size": 2, "patience": 2.0}]
    jobs = []
    for id, chosen in enumerate(options):
        made = job(id, timestamps=bool(id % 2), **chosen)
        frames = encoder_frames(len(made.features) / 16_000, "auto")
        more = {
            "frames": frames,
            "align_frames": 50 * (id % 2),
            "loop_tokens": 8,
            "urgent": id == 3,
        }
        jobs.append(dataclasses.replace(made, draft=(5, 6, 7) * (id == 0), **more))
    found = run(runtime, jobs)
    expected = run(
        here,
        [
            dataclasses.replace(one, features=log_mel(one.features, one.frames * HOP_LENGTH))
            for one in jobs
        ],
    )
    here.close()
    for one in jobs:
        ours, theirs = found[one.id], expected[one.id]
        assert ours.result == theirs.result
        assert ours.last.scores.avg_logprob == theirs.last.scores.avg_logprob
        assert (
            (ours.last.alignment is None)
            == (theirs.last.alignment is None)
            == (not one.align_frames)
        )
        if one.align_frames:
            kept = vars(ours.last.alignment), vars(theirs.last.alignment)
            for name, value in kept[0].items():
                np.testing.assert_array_equal(value, kept[1][name])


def test_what_is_refused_is_refused_at_once_or_by_its_event(job, runtime):
    with pytest.raises(OptionError, match="do not fit a context"):
        runtime.submit(job(1, max_tokens=0))
    (entry,) = run(runtime, [dataclasses.replace(job(2), frames=4000)]).values()
    assert entry.last.finished == "error"
    assert type(entry.last.error) is OptionError
    assert "4000 frames; expected at most 3000" in str(entry.last.error)


def test_a_job_is_cancelled_before_and_after_it_is_sent(job, runtime):
    jobs = [job(id, max_tokens=400) for id in range(3 * SLOTS)]
    for one in jobs:
        runtime.submit(one)
    for one in (jobs[-1], jobs[0]):  # the last waits for room in the memory
        runtime.cancel(one.id)
    reasons = {}
    while len(reasons) < len(jobs):
        reasons |= {event.job_id: event.finished for event in runtime.poll(0.1) if event.finished}
    assert reasons[jobs[-1].id] == "cancelled" and reasons[jobs[0].id] in (
        "cancelled",
        "eot",
        "length",
    )
    assert not runtime.poll(0.0) and runtime.gauges().busy_slots == 0


def test_why_it_does_not_start_is_said_here(engine):
    with pytest.raises(
        UnavailableError, match=r"runtime\.rows = 2 is less than runtime\.slots = 3"
    ):
        ProcessRuntime(engine, dataclasses.replace(CONFIG, rows=2))


def test_a_process_that_dies_ends_what_it_had_with_a_clear_error(engine, job):
    runtime = ProcessRuntime(engine, CONFIG)
    runtime.submit(job(1, max_tokens=400))
    process_of().kill()
    words = "native runtime failed: the native runtime process ended with status -9; see its log"
    with pytest.raises(DeviceError, match=words):
        for _ in range(10_000):
            runtime.poll(0.05)
    with pytest.raises(DeviceError, match=words):
        runtime.submit(job(2))
    with pytest.raises(DeviceError, match=words):
        runtime.gauges()
    runtime.close()


PARENT = """
import sys
from serve.contract.config import RuntimeConfig
from serve.contract.engine import open_engine
from serve.native.process import ProcessRuntime
runtime = ProcessRuntime(open_engine(sys.argv[1]), RuntimeConfig(slots=1, threads=1))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.nightly
def test_it_ends_with_its_parent(engine):
    command = [sys.executable, "-c", PARENT, str(engine.path)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"ready\n"
    process = process_of(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    gone, _ = psutil.wait_procs([process], timeout=WAIT_S)
    assert gone, "it outlives its parent"
