"""What a scenario's checks come to, and the two reports."""

import json

import pytest

from eval.soak.verdict import Check, Finding, verdict, word, write_report

GOOD = Check("all is well", True, "7 of 7")
BAD = Check("a | b", False, "two\nlines")
OPEN = Check("it levels off", None, "1 [-9, 9]")


@pytest.mark.parametrize(
    ("checks", "passed", "said"),
    [
        ([], True, "passed"),
        ([True, True], True, "passed"),
        ([True, None], None, "not decided"),
        ([None, False, True], False, "FAILED"),
    ],
)
def test_one_failure_fails_and_one_doubt_leaves_it_open(checks, passed, said):
    assert verdict(checks) is passed
    assert word(passed) == said


def test_both_reports_say_what_happened(tmp_path):
    findings = [
        Finding("memory", "it levels off", (GOOD, OPEN), {"requests": 12.0}, 3.0),
        Finding("kills", "it comes back", (GOOD, BAD), {}, 4.0),
    ]
    write_report(tmp_path, "demo", findings)
    record = json.loads((tmp_path / "soak.json").read_text())
    assert [one["passed"] for one in record["scenarios"]] == [None, False]
    assert record["scenarios"][0]["figures"] == {"requests": 12.0}
    lines = (tmp_path / "soak.md").read_text().splitlines()
    assert "| memory | not decided | it levels off: 1 [-9, 9] | 3 s |" in lines
    assert "| kills | FAILED | a \\| b: two lines | 4 s |" in lines
    assert "| requests | 12.000 |" in lines
