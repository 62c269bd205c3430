import pytest

from eval.accuracy.worker import drive, wall_s
from tests.eval.fakes import FakeSystem, timed_call, write_clips

SAID = {f"{n}.txt": f"clip number {n}" for n in range(6)}


def driven(system, clips, **options):
    rows = []
    drive(system, clips, phase="loaded", emit=rows.append, **options)
    return rows


def test_every_clip_once_per_pass_with_its_own_text(tmp_path):
    clips = write_clips(tmp_path, SAID)
    rows = driven(FakeSystem(), clips, concurrency=4, repeats=3)
    assert sorted((r.file, r.repeat) for r in rows) == sorted(
        (file, repeat) for file in SAID for repeat in range(3)
    )
    assert all(r.text == r.reference == SAID[r.file] for r in rows)
    assert all(r.concurrency == 4 and r.latency_s >= 0.002 and r.started_s >= 0 for r in rows)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_never_more_calls_than_asked(tmp_path, concurrency):
    system = FakeSystem()
    driven(system, write_clips(tmp_path, SAID), concurrency=concurrency, repeats=4)
    assert system.most_running == concurrency


def test_same_order_every_time_but_not_in_every_pass(tmp_path):
    clips = write_clips(tmp_path, SAID)
    orders = [
        [r.file for r in driven(FakeSystem(), clips, concurrency=1, repeats=2)] for _ in range(2)
    ]
    assert orders[0] == orders[1]
    assert orders[0][:6] != orders[0][6:]


def test_a_failed_call_is_a_row_and_the_rest_goes_on(tmp_path):
    clips = write_clips(tmp_path, {**SAID, "bad.txt": "fail"})
    rows = driven(FakeSystem(), clips, concurrency=2, repeats=1)
    failed = [r for r in rows if r.error]
    assert len(rows) == 7
    assert [(r.file, r.prediction, r.error) for r in failed] == [
        ("bad.txt", None, "AudioError: AUDIO: cannot be decoded")
    ]


def test_a_bug_is_not_a_row(tmp_path):
    clips = write_clips(tmp_path, {**SAID, "bad.txt": "bug"})
    with pytest.raises(ZeroDivisionError):
        driven(FakeSystem(), clips, concurrency=2, repeats=1)


def test_wall_spans_first_start_to_last_answer():
    rows = [
        timed_call("a", "", "", started_s=2.0, latency_s=1.0),
        timed_call("b", "", "", started_s=1.0, latency_s=5.0),
    ]
    assert wall_s(rows) == 5.0
