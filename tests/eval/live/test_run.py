"""What a measurement complains of, and what it needs before a server is started."""

import dataclasses

import eval.live.run
from eval.__main__ import main
from eval.live.run import Level

GOOD = Level(
    streams=4, audio_s=100.0, words=200, matched=180, p50_s=1.0, p95_s=1.9, changed_per_word=0.3,
    cer=4.4, offline_cer=4.0, short_cer=4.1, configured_cer=3.0, failed=0,
)  # fmt: skip


def test_what_is_late_or_worse_or_failed_is_named():
    assert GOOD.complaints == [] and GOOD.held
    bad = dataclasses.replace(GOOD, p95_s=2.5, cer=5.0, failed=1)
    assert not bad.held
    assert bad.complaints == [
        "4 streams: 1 utterances failed",
        "4 streams: p95 is 2.50 s; expected at most 2",
        "4 streams: CER is 1.00 points above that of whole clips; expected at most 0.5",
    ]


def test_the_exit_status_is_of_the_last_number_of_streams(monkeypatch, capsys, tmp_path):
    bad = dataclasses.replace(GOOD, p95_s=2.5)
    for levels, code in (([bad, GOOD], 0), ([GOOD, bad], 1)):
        monkeypatch.setattr(eval.live.run, "live", lambda *_, levels=levels: levels)
        line = ["live", "--config", "configs/demo.toml", "--output", str(tmp_path)]
        assert main(line) == code
        assert capsys.readouterr().err == "4 streams: p95 is 2.50 s; expected at most 2\n" * code


def test_clips_without_text_are_refused_before_a_server_starts(tmp_path, capsys):
    clips = tmp_path / "clips.jsonl"
    clips.write_text('{"file": "a.wav", "text": "", "language": null, "duration": 1.0}\n')
    (tmp_path / "a.wav").write_bytes(b"")
    config = tmp_path / "quiet.toml"
    config.write_text(f'[eval]\nmanifest = "{clips}"\n')
    assert main(["live", "--config", str(config)]) == 2
    assert "has no clip with text; expected some" in capsys.readouterr().err
