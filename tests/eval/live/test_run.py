"""What a measurement tells and complains of, and what it needs before a server is started."""

import contextlib
import dataclasses
import json

import pytest

import eval.live
from build.clips import Clip
from eval.config import EvaluationProduct
from eval.live import Level, live
from serve.cli.live_client import Heard
from serve.contract.errors import EarshotError
from serve.contract.messages import Segment, Timings, Transcript, Word
from serve.contract.server_config import LiveConfig

GOOD = Level(
    streams=4,
    audio_s=100.0,
    words=200,
    matched=180,
    p50_s=1.0,
    p95_s=1.9,
    p99_s=2.4,
    changed_per_word=0.3,
    cer=4.4,
    whole_cer=4.0,
    from_whole=1.2,
    failed=0,
)
SAID = "All is quiet. The rain has gone."


def transcript(text):
    words = tuple(Word(i, i + 1.0, f" {word}", 1.0) for i, word in enumerate(text.split()))
    segment = Segment(0.0, 9.0, text, (), None, None, 0.0, 1.0, words)
    return Transcript(text, "en", None, 9.0, (segment,), Timings(0.0, 0.0, 0.0, 0.0))


class Told:
    """In place of a system: what it is to tell of every stream, and when.

    Every word ends at a whole second, and is final one and a half later.
    """

    loop = None

    def __init__(self, live, failed=False):
        self.asked, self._live, self._failed = [], live, failed

    def whole(self, request):
        self.asked.append(request)
        return transcript(SAID)

    async def play(self, blocks, transcription):
        assert transcription == {"language": "en"}
        for number, word in enumerate(self._live.split()):
            event = {"type": "x.delta", "item_id": "item", "delta": " " * bool(number) + word}
            yield Heard(number + 2.5, event)
        kind = "x.failed" if self._failed else "x.completed"
        yield Heard(9.0, {"type": kind, "item_id": "item", "transcript": self._live})

    def changed(self):
        return float(len(self.asked))


@pytest.fixture
def measure(monkeypatch, tmp_path, run_of):
    """Measures what a system tells of one clip."""
    monkeypatch.setattr(eval.live, "_APART_S", 0.0)
    clip = Clip(*("a.wav", tmp_path / "a.wav", "All is quiet the rain was gone", "en", 7.0))

    def measure(system, streams=(1,)):
        def opened(config, decode_s):
            assert decode_s == 0.5
            return contextlib.nullcontext(system)

        monkeypatch.setattr(eval.live, "open_system", opened)
        monkeypatch.setattr(eval.live, "decode", lambda audio, limits: [])
        clip.path.write_bytes(b"audio")
        monkeypatch.setattr(eval.live, "passages", lambda config, join_s: [clip])
        run = run_of(EvaluationProduct(live=LiveConfig(short_encoder="on")), "live")
        return live(run, streams=streams, clips=1, join_s=60.0, simulate=0.5)

    return measure


def test_live_text_is_held_against_whole_recordings_and_against_what_is_right(measure, tmp_path):
    system = Told("All is quiet. the rain had gone.")
    (level,) = measure(system).figures
    assert [request.word_timestamps for request in system.asked] == [True]
    assert (level.words, level.matched, level.p50_s, level.p99_s) == (7, 6, 1.5, 1.5)
    length = len("all is quiet the rain was gone")
    assert level.cer == pytest.approx(200 / length), "had for was"
    assert level.whole_cer == pytest.approx(100 / length), "has for was"
    assert level.from_whole == pytest.approx(100 / length)
    assert level.failed == 0
    record = json.loads((tmp_path / "live.json").read_text())
    assert record["settings"]["live"]["short_encoder"] == "on"
    assert [one["p95_s"] for one in record["figures"]] == [1.5]


def test_a_whole_recording_is_asked_for_once(measure):
    system = Told(SAID)
    result = measure(system, streams=(1, 2))
    one, two = result.figures
    assert len(system.asked) == 1
    assert (one.words, two.words, two.streams) == (7, 14, 2)
    assert all(check.passed for check in result.checks) and two.changed_per_word == 0


def test_utterances_without_text_are_counted(measure):
    failed, *_ = measure(Told(SAID, failed=True)).checks
    assert str(failed) == "FAILED: every utterance has its text with 1 streams. 1 failed"
    with pytest.raises(EarshotError, match="no word became final"):
        measure(Told(""))


def test_what_is_late_or_worse_or_failed_is_named():
    assert all(check.passed for check in GOOD.checks)
    bad = dataclasses.replace(GOOD, p95_s=2.5, cer=5.0, failed=1)
    assert [str(check) for check in bad.checks] == [
        "FAILED: every utterance has its text with 4 streams. 1 failed",
        "FAILED: 95 of 100 words are final within 2 s with 4 streams. 2.50 s",
        "FAILED: CER at most 0.5 points above that of whole recordings with 4 streams. "
        "+1.00 points",
    ]
