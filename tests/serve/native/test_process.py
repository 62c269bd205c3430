"""The native runtime in a separate process: it says what it says in this process, and its end is
noticed on either side."""

import collections
import dataclasses
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import mel_filters, open_engine
from serve.contract.errors import DeviceError, OptionError, UnavailableError
from serve.contract.phrases import build_trie
from serve.native import process
from serve.native.process import ProcessRuntime
from serve.native.runtime import NativeRuntime
from serve.speech.features import HOP_LENGTH, LogMel
from serve.transcriber.active import encoder_frames
from tests.runtimes import SLOTS, Ended, collect, run, samples_job
from tests.waits import WAIT_S, wait_until

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
    """The process of the runtime that this process or another has opened last."""
    children = psutil.Process(parent).children(recursive=True)
    found = [child for child in children if "serve.native import process" in str(child.cmdline())]
    return max(found, key=psutil.Process.create_time)


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
    for one in jobs:  # alone: beside others the last bits of a score may differ
        log_mels = dataclasses.replace(one, features=log_mel(one.features, one.frames * HOP_LENGTH))
        (ours,), (theirs,) = run(runtime, [one]).values(), run(here, [log_mels]).values()
        assert ours.result == theirs.result
        assert ours.last.scores.avg_logprob == theirs.last.scores.avg_logprob
        both = ours.last.alignment, theirs.last.alignment
        assert [part is not None for part in both] == [bool(one.align_frames)] * 2
        if one.align_frames:
            for name, value in vars(both[0]).items():
                np.testing.assert_array_equal(value, getattr(both[1], name))
    here.close()


def test_what_is_refused_is_refused_at_once_or_by_its_event(job, runtime):
    with pytest.raises(OptionError, match="do not fit a context"):
        runtime.submit(job(1, max_tokens=0))
    (entry,) = run(runtime, [dataclasses.replace(job(2), frames=4000)]).values()
    assert entry.last.finished == "error"
    assert type(entry.last.error) is OptionError
    assert "4000 frames; expected at most 3000" in str(entry.last.error)


def test_a_job_is_cancelled_wherever_it_is(job, runtime):
    """In the process, in a slot or not; and while it waits for room in the memory."""
    jobs, ended = (
        [job(id, max_tokens=400) for id in range(3 * SLOTS)],
        collections.defaultdict(Ended),
    )
    paused = process_of()
    paused.suspend()
    for one in jobs:
        runtime.submit(one)
    for one in (jobs[0], jobs[-1]):
        runtime.cancel(one.id)
    paused.resume()
    collect(runtime, ended, range(len(jobs)))
    reasons = [ended[one.id].last.finished for one in jobs]
    assert reasons[0] == reasons[-1] == "cancelled"
    assert "cancelled" not in reasons[1:-1]
    assert not runtime.poll(0.0) and runtime.gauges().busy_slots == 0


def test_why_it_does_not_start_is_said_here(engine):
    with pytest.raises(
        UnavailableError, match=r"runtime\.rows = 2 is less than runtime\.slots = 3"
    ):
        ProcessRuntime(engine, dataclasses.replace(CONFIG, rows=2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM])
def test_a_process_that_dies_ends_what_it_had_with_a_clear_error(engine, job, capfd, number):
    """SIGALRM comes when it stalls."""
    runtime = ProcessRuntime(engine, CONFIG)
    runtime.submit(job(1, max_tokens=400))
    process_of().send_signal(number)
    words = f"native runtime failed: the native runtime process ended with status -{number}; see"
    with pytest.raises(DeviceError, match=words):
        wait_until(lambda: runtime.poll(0.05) and False)
    with pytest.raises(DeviceError, match=words):
        runtime.submit(job(2))
    with pytest.raises(DeviceError, match=words):
        runtime.gauges()
    runtime.close()
    assert ("most recent call first" in capfd.readouterr().err) == (number == signal.SIGALRM)


class Connected:
    """A runtime's process on a thread of this one, where tests can break it."""

    def __init__(self, memory, connection):
        mine = Connection(os.dup(connection.fileno()))
        self._served = threading.Thread(target=process.serve, args=(mine, os.dup(memory)))
        self._served.start()

    def wait(self, timeout):
        self._served.join(timeout)
        if self._served.is_alive():
            raise subprocess.TimeoutExpired("a thread", timeout)
        return 0

    def kill(self):
        self._served.join(WAIT_S)


@pytest.mark.parametrize(
    ("place", "all_fail"),
    [
        ("serve.speech.features.log_mel", False),
        ("serve.native.runtime.NativeRuntime.poll", True),
        ("serve.native.process._EventFields", True),
    ],
)
def test_a_bug_is_reported_and_ends_no_more_than_it_must(
    engine, job, monkeypatch, caplog, place, all_fail
):
    monkeypatch.setattr(process, "_start", Connected)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    runtime = ProcessRuntime(engine, CONFIG)
    honest = pkgutil.resolve_name(place)

    def planted(*args, **options):
        if place.endswith("poll") and not args[0]._running and not len(args[0]._scheduler):
            return honest(*args, **options)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(place, planted)
    runtime.submit(job(1))
    if all_fail:
        with pytest.raises(
            DeviceError, match=r"failed: internal error: ZeroDivisionError\('planted'"
        ):
            wait_until(lambda: runtime.poll(0.05) and False)
    else:
        ended = collections.defaultdict(Ended)
        collect(runtime, ended, [1])
        assert "ZeroDivisionError('planted')" in str(ended[1].last.error)
        monkeypatch.setattr(place, honest)
        assert run(runtime, [job(2)])[2].last.finished != "error"
    runtime.close()
    assert "Traceback" in caplog.text, "the log tells where"


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
@pytest.mark.parametrize("when", ["starting", "ready"])
def test_it_ends_with_its_parent(engine, when):
    command = [sys.executable, "-c", PARENT, str(engine.path)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if when == "ready":
        assert parent.stdout.readline() == b"ready\n"
    wait_until(lambda: psutil.Process(parent.pid).children())
    started = psutil.Process(parent.pid).children()
    parent.kill()
    parent.communicate()
    gone, _ = psutil.wait_procs(started, timeout=WAIT_S)
    assert gone, "it outlives its parent"
