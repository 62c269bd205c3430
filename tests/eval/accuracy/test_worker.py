import multiprocessing
import os
from dataclasses import replace

import pytest

from eval import processes
from eval.accuracy.predictions import LoadPhase, read_calls
from eval.accuracy.worker import drive, measure_system, timed_phases
from eval.config import EvalConfig, EvaluationProduct
from eval.record import write_jsonl
from serve.contract.errors import ConfigError, DeadlineError, UnavailableError
from tests.eval.fakes import FakeSystem, open_fake, timed_call, write_clips

CONFIG = EvaluationProduct(eval=EvalConfig(concurrency=3, repeats=2, threads=1))
SAID = {"a.txt": "one", "b.txt": "two", "c.txt": ""}
HELDOUT = {"h.txt": "three", "i.txt": "four"}


def measured(tmp_path, name="fake", said=SAID, config=CONFIG):
    rows = []
    sets = {"heldout": write_clips(tmp_path, HELDOUT), "timed": write_clips(tmp_path, said)}
    phases = [LoadPhase("accuracy", clips, 3, clip_set=name) for name, clips in sets.items()]
    phases += timed_phases(sets["timed"], config.eval)
    log = tmp_path / "logs" / "fake.log"
    result = measure_system(
        name, config, phases, open_system=open_fake, on_call=rows.append, log=log
    )
    return result, rows


def test_phases_threads_and_process_are_as_stated(tmp_path):
    environment = dict(os.environ)
    result, rows = measured(tmp_path)
    assert dict(os.environ) == environment
    assert result.settings["threads"] == result.settings["cores"] == "1"
    assert int(result.settings["pid"]) != os.getpid()
    phases = [(r.phase, r.clip_set) for r in rows]
    assert phases == [
        *[("accuracy", "heldout")] * 2,
        *[("accuracy", "timed")] * 3,
        *[("alone", "timed")] * 6,
        *[("one_clip", "timed")] * 6,
        *[("loaded", "timed")] * 6,
    ]
    assert sorted(r.file for r in rows[:5]) == sorted([*HELDOUT, *SAID])
    assert {r.file for r in rows if r.phase == "one_clip"} == {"b.txt"}  # 6 s; c has no speech
    assert all(r.text == (SAID | HELDOUT)[r.file] for r in rows)
    assert "opening fake" in (tmp_path / "logs" / "fake.log").read_text()
    assert not multiprocessing.active_children()


@pytest.mark.nightly
@pytest.mark.parametrize(("told", "code"), [(False, "und"), (True, "en")])
def test_the_language_is_told_where_that_is_asked_for(tmp_path, told, code):
    config = replace(CONFIG, eval=replace(CONFIG.eval, tell_language=told))
    _, rows = measured(tmp_path, config=config)
    assert {r.prediction.language for r in rows if r.reference} == {code}


@pytest.mark.nightly
def test_memory_belongs_to_one_system(tmp_path):
    small, _ = measured(tmp_path)
    big, _ = measured(tmp_path, "big")
    again, _ = measured(tmp_path)
    assert big.peak_memory_bytes - small.peak_memory_bytes > 150_000_000
    assert abs(again.peak_memory_bytes - small.peak_memory_bytes) < 50_000_000


@pytest.mark.parametrize(
    ("name", "said", "error", "message"),
    [
        ("missing", "one", UnavailableError, "needs a device that is not here"),
        ("fake", "die", UnavailableError, r"fake ended early: opening fake; its log is .*log"),
        ("fake", "hang", DeadlineError, "fake said nothing for 1 s"),
    ],
)
def test_a_system_that_fails_is_named_and_leaves_no_process(
    tmp_path, monkeypatch, name, said, error, message
):
    monkeypatch.setattr(processes, "TERMINATE_TIMEOUT_S", 0.5)
    config = replace(CONFIG, transcriber=replace(CONFIG.transcriber, request_timeout_s=0.5))
    with pytest.raises(error, match=message):
        measured(tmp_path, name, {"a.txt": said}, config)
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- load


MANY = {f"{n}.txt": f"clip number {n}" for n in range(6)}


def driven(system, clips, **options):
    rows = []
    drive(system, LoadPhase("loaded", clips, **options), rows.append)
    return rows


def test_a_call_that_fails_is_a_row_with_its_error(tmp_path):
    rows = driven(FakeSystem(), write_clips(tmp_path, {"a.txt": "fail"}), concurrency=2, repeats=2)
    failed = ("a.txt", None, "AudioError: AUDIO: cannot be decoded")
    assert [(r.file, r.prediction, r.error) for r in rows] == [failed] * 2
    assert all(r.latency_s >= 0.002 and r.started_s >= 0 for r in rows)


def test_same_order_every_time_but_not_in_every_pass(tmp_path):
    clips = write_clips(tmp_path, MANY)
    orders = [
        [r.file for r in driven(FakeSystem(), clips, concurrency=1, repeats=2)] for _ in range(2)
    ]
    assert orders[0] == orders[1]
    assert orders[0][:6] != orders[0][6:]
    rows = driven(FakeSystem(), clips, concurrency=4, repeats=3)
    assert sorted(r.file for r in rows) == sorted([*MANY] * 3), "every clip once in each pass"
    assert all(r.text == r.reference == MANY[r.file] for r in rows)


def test_a_bug_is_not_a_row(tmp_path):
    clips = write_clips(tmp_path, {**MANY, "bad.txt": "bug"})
    with pytest.raises(ZeroDivisionError):
        driven(FakeSystem(), clips, concurrency=2)


# ---------------------------------------------------------------- predictions


def test_rows_survive_the_file_and_others_are_named(tmp_path):
    rows = [
        timed_call("a", "ça va", "ça va\nbien\u2028sí"),
        timed_call("b", "", "", prediction=None, error="Lost: x"),
    ]
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, rows)
    assert read_calls(path) == rows and rows[1].text == ""
    path.write_text('\n{"file": "b"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: reference is missing; has file; expect"):
        read_calls(path)
