import dataclasses
import json

import pytest

from eval.accuracy.report import (
    Report,
    compare,
    ratios,
    read_report,
    report_to_json,
    table,
    to_markdown,
)
from eval.accuracy.run import RunFacts
from eval.accuracy.score import gates, score_system
from serve.errors import ConfigError
from tests.eval.fakes import facts, timed_call

RUN = RunFacts(
    id="r",
    started="2026-01-02T03:04:05+00:00",
    config_name="demo",
    manifest="m.jsonl",
    systems=("earshot-int8", "faster-whisper-int8"),
    clips=2,
    audio_s=20.0,
    ten_second_clip="a.wav",
    concurrency=8,
    repeats=1,
    threads=2,
    max_cer_gap_faster_whisper=0.3,
    max_cer_gap_fp16=0.2,
    machine={"CPU": "a chip", "GPU": "none"},
)


def score(name, text, seconds):
    rows = [
        timed_call(file, reference, said, phase=phase, latency_s=seconds)
        for phase in ("loaded", "alone")
        for file, reference, said in (("a.wav", "hello you", text), ("n.wav", "", ""))
    ]
    rows.append(timed_call("a.wav", "hello you", text, phase="one_clip", latency_s=seconds))
    return score_system(facts(name), rows, "basic-v1")


def report(ours="hello you", seconds=0.5):
    scores = (score("earshot-int8", ours, seconds), score("faster-whisper-int8", "hello you", 1.0))
    return Report(RUN, "basic-v1", scores, tuple(gates(scores, 0.3, 0.2)))


def test_markdown_states_figures_conditions_and_gates():
    text = to_markdown(report("hallo you"))
    for part in (
        "**FAILED**: CER of earshot-int8 at most 0.3 points above faster-whisper-int8. "
        "11.11 % - 0.00 % = +11.11 points",
        "not judged: CER of earshot-int8 at most 0.2 points above earshot-fp16",
        "| 11.11 % [11.11, 11.11] |",
        "1/0/0 of 9",
        "`basic-v1`: Unicode NFKC",
        "500 / 500 / 500",
        "- CPU: a chip",
        "10 s clip is `a.wav`",
        "2 calls alone, 2 under load",
    ):
        assert part in text
    assert "**FAILED**" not in to_markdown(report())
    assert "Nothing: every clip was heard without an error" in to_markdown(report())


def test_ratios_are_ours_over_theirs():
    found = ratios(report(seconds=0.5).systems)
    assert found == {"earshot-int8": {"throughput": 2.0, "memory": 1.0, "ten_second_latency": 0.5}}
    assert ratios(report().systems[:1]) == {}


def test_json_holds_everything_and_the_verdict():
    good, bad = (json.loads(report_to_json(report(text))) for text in ("hello you", "x"))
    assert (good["passed"], bad["passed"]) == (True, False)
    assert good["systems"][0]["overall"]["cer"]["counts"] == {
        "substitutions": 0,
        "deletions": 0,
        "insertions": 0,
        "hits": 9,
    }
    assert good["run"]["machine"] == {"CPU": "a chip", "GPU": "none"}


def test_compare_shows_differences():
    a, b = report(), report("hallo you", seconds=0.25)
    text = compare(a, b)
    lines = {line.replace(" ", "") for line in text.splitlines()}
    assert "|earshot-int8|CER%|0.00|11.11|+11.11|" in lines
    assert "|earshot-int8|10sclipms|500|250|-250|" in lines
    assert "|faster-whisper-int8|RTFxloaded|20.0|20.0|+0.0|" in lines
    assert "NOTE" not in text


def test_compare_warns_of_other_conditions_and_refuses_what_is_not_comparable():
    a = report()
    b = dataclasses.replace(a, run=dataclasses.replace(a.run, threads=4))
    assert "NOTE: threads differs: 2 and 4" in compare(a, b)
    with pytest.raises(ConfigError, match="share no system"):
        compare(a, dataclasses.replace(b, systems=()))


def test_a_report_comes_back_from_its_file_or_folder(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report_to_json(report("hallo you")))
    assert read_report(path) == read_report(tmp_path) == report("hallo you")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has format version None, this Earshot reads 1; write it again with `python -m ev"),
        ('{"format_version": 2}', "has format version 2"),
        ('{"format_version": 1}', "run is missing; has format_version; write it again with"),
        ("[", "is not JSON"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused(tmp_path, text, message):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"report\.json:? {message}"):
        read_report(path)


def test_table_lines_up():
    assert table(["a", "bb"], [["long", "1"]]).splitlines() == [
        "| a    | bb |",
        "|------|---:|",
        "| long |  1 |",
    ]
