"""The whole command over recordings of a minute, with systems that are not there."""

import json
import types

import pytest

from eval.__main__ import main
from eval.accuracy import systems
from eval.accuracy.predictions import Prediction, SystemFacts, TimedText
from eval.accuracy.score import Counts, rate
from eval.accuracy.worker import drive
from eval.long import OUR_DEFAULT, compose
from eval.long.compose import PlannedRecording, read_manifest
from eval.long.score import LongFormResult, coverage_gates
from serve.contract.errors import UnavailableError

PEER, OTHER = "faster-whisper-default", "earshot-int8"  # the latter is of `eval run`


class Listener:
    """Knows what was said where; but our default's ears lose nothing, others' every fifth."""

    def __init__(self, name, recordings, folder):
        self.name, self.recordings, self.folder = name, recordings, folder

    def transcribe(self, audio, language):
        found = next(o for o in self.recordings if (self.folder / o.file).read_bytes() == audio)
        segments = tuple(
            TimedText(s.start_s, s.end_s, s.text, number // 5)
            for number, s in enumerate(found.sentences)
            if number % 5 or self.name == OUR_DEFAULT
        )
        return Prediction(" ".join(s.text for s in segments), "en", segments)


@pytest.fixture
def config(tmp_path, monkeypatch, manifest):
    """A config, and speech of which recordings are made."""
    codes = enumerate(("en", "es") * 20)
    speech = manifest(*({"text": f"This is {n}.", "language": code} for n, code in codes))
    planned = [
        PlannedRecording("tones", ("en",), 0.5),
        PlannedRecording("languages", ("es", "en"), 0.5),
    ]
    monkeypatch.setattr(compose, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(compose, "plan", lambda languages, minutes: planned)
    monkeypatch.setattr("eval.long.run.prepare", lambda *_: None)
    monkeypatch.setattr("eval.accuracy.run.measure_system", measure)
    path = tmp_path / "small.toml"
    path.write_text(f'[eval]\nmanifest = "{speech}"\nheldout = ""\n')
    return path


def measure(name, config, phases, *, open_system, on_call, log):
    """What the process of a system does, in this one."""
    assert open_system is systems.open_system
    assert (config.eval.concurrency, config.runtime.threads) == (1, config.eval.threads)
    folder = phases[0].clips[0].path.parent
    listener = Listener(name, read_manifest(folder / "manifest.jsonl"), folder)
    drive(listener, phases[0], on_call)
    if name == OTHER and not (folder.parent / "mended").exists():
        raise UnavailableError(f"{OTHER} ended early")
    return SystemFacts(name, {"threads": "1"}, 0.1, 1 << 20)


def long(config, *flags):
    folder = config.parent / "out"
    return main(["long", "--config", str(config), "--output", str(folder), *flags]), folder


def test_a_run_goes_on_where_it_ended_and_is_judged(config, capsys):
    code, folder = long(config, "--systems", f"{OUR_DEFAULT},{OTHER}")
    assert code == 1 and f"{OTHER} ended early" in capsys.readouterr().err
    kept = (folder / "predictions" / f"{OUR_DEFAULT}.jsonl").read_text()
    assert kept.count("\n") == 2
    (config.parent / "cache" / "mended").touch()
    code, _ = long(config, "--systems", f"{OUR_DEFAULT},{OTHER},{PEER}")
    out = capsys.readouterr()
    assert code == 0 and f"- passed: CER of {OUR_DEFAULT}" in out.out
    assert "not decided: CER of earshot-no-timestamps" in out.err  # it did not hear them
    # What was heard was not heard again.
    assert (folder / "predictions" / f"{OUR_DEFAULT}.jsonl").read_text() == kept
    report = json.loads((folder / "long.json").read_text())["figures"]
    found = {system["facts"]["name"]: system for system in report["systems"]}
    assert list(found) == [OUR_DEFAULT, PEER, OTHER]
    assert found[OUR_DEFAULT]["overall"]["cer"]["percent"] == 0.0
    peers = found[PEER]["overall"]
    assert peers["wer"]["counts"]["deletions"] == peers["lost_in_stretches"] > 0
    assert set(found[PEER]["by_kind"]) == {"tones", "languages"}
    assert report["unfinished"] == []
    page = (folder / "report.html").read_text()
    assert "long: small" in page and "CER, %" in page and PEER in page
    long(config, "--systems", PEER, "--seed", "1")
    report = json.loads((folder / "long.json").read_text())["figures"]
    assert [s["facts"]["name"] for s in report["systems"]] == [PEER]


def test_our_default_may_not_be_worse(config, capsys, monkeypatch):
    """The peer hears everything, ours every fifth sentence less."""
    code, folder = long(config, "--systems", f"{OUR_DEFAULT},{PEER}")
    lines = {name: folder / "predictions" / f"{name}.jsonl" for name in (OUR_DEFAULT, PEER)}
    texts = {name: path.read_text() for name, path in lines.items()}
    lines[OUR_DEFAULT].write_text(texts[PEER])
    lines[PEER].write_text(texts[OUR_DEFAULT])
    capsys.readouterr()
    code, _ = long(config, "--systems", OUR_DEFAULT)
    err = capsys.readouterr().err
    assert code == 1
    assert f"FAILED: CER of {OUR_DEFAULT} at most 0.1 points above faster-whisper's best" in err
    assert f"FAILED: words lost or added by {OUR_DEFAULT} beside its cuts" in err
    code, _ = long(config, "--systems", OUR_DEFAULT, "--again")
    assert code == 0 and lines[OUR_DEFAULT].read_text() != texts[PEER]


def _score(name, **lost):
    """Of a system that lost so many of 200 words of each kind."""
    words = rate([Counts(hits=200)])
    figures = {
        kind: LongFormResult(words, words, count, repeated=0, made_up=0, unspoken=0)
        for kind, count in lost.items()
    }
    return types.SimpleNamespace(name=name, by_kind=figures)


@pytest.mark.parametrize(("ours", "theirs", "good"), [(0, 5, True), (2, 5, False), (1, 0, False)])
def test_what_people_read_may_not_be_lost(ours, theirs, good):
    mine, peer = _score(OUR_DEFAULT, reading=ours, noise=50), _score(PEER, reading=theirs, noise=0)
    (gate,) = coverage_gates(mine, [peer])
    assert gate.passed is good and f"{theirs / 2:.2f} % ({PEER})" in gate.detail
    (alone,) = coverage_gates(mine, [])
    assert alone.passed is (ours < 2) and "not run" in alone.detail
