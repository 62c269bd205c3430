"""What scenarios found, for people and in the record."""

import json

from eval.measurement import Check
from eval.soak.report import Finding, reported

GOOD = Check("all is well", True, "7 of 7")
BAD = Check("a | b", False, "two\nlines")
OPEN = Check("it levels off", None, "1 [-9, 9]")


def test_both_reports_say_what_happened(tmp_path, run_of):
    findings = [
        Finding("memory", "it levels off", (GOOD, OPEN), {"requests": 12.0}, 3.0),
        Finding("kills", "it comes back", (GOOD, BAD), {}, 4.0),
    ]
    result = reported(run_of(command="soak"), findings)
    assert result.text.startswith("# Soak: demo") and "##" not in result.text
    record = json.loads((tmp_path / "soak.json").read_text())
    assert record["verdict"] == "failed"
    assert [one["passed"] for one in record["checks"]] == [True, None, True, False]
    assert record["figures"]["scenarios"][0]["figures"] == {"requests": 12.0}
    lines = (tmp_path / "soak.md").read_text().splitlines()
    assert "| memory | not decided | it levels off: 1 [-9, 9] | 3 s |" in lines
    assert "| kills | FAILED | a \\| b: two lines | 4 s |" in lines
    assert "| requests | 12.000 |" in lines
