"""Findings of scenarios."""

import dataclasses
from collections.abc import Iterator, Sequence

from eval.record import Check, Result, Run, Section, Table, Text, Verdict, loud, verdict

Found = Iterator[Check | tuple[str, float]]
"""Checks, and figures as a name with its value."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one scenario."""

    scenario: str
    title: str
    checks: tuple[Check, ...]
    figures: dict[str, float]  # by name, which ends in its unit
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of its checks."""
        return verdict(self.checks)


def kept(run: Run, findings: Sequence[Finding]) -> Result:
    """Keep the findings so far, and return the result.

    Raises:
        FileError: the record cannot be written.
    """
    rows = []
    for finding in findings:
        bad = [check for check in finding.checks if check.passed is not True]
        summary = "; ".join(f"{check.name}: {check.detail}" for check in bad or finding.checks)
        outcome = loud(finding.verdict)
        rows.append([finding.scenario, outcome, f"{finding.seconds:.0f} s", summary])
    header = ["scenario", "", "took", "what happened"]
    sections = [Section("Scenarios", [Table(header, rows, prose=True)])]
    for finding in findings:
        items = [
            f"{loud(verdict([check]))}: {check.name}: {check.detail}" for check in finding.checks
        ]
        values = [[name, f"{value:,.3f}"] for name, value in finding.figures.items()]
        parts = [Text("", items=items), Table(["figure", ""], values)]
        title = f"{finding.scenario}: {finding.title}"
        sections.append(Section(title, parts, printed=False))
    checks = tuple(check for finding in findings for check in finding.checks)
    result = Result({"scenarios": findings}, checks, tuple(sections))
    run.keep(result)
    return result
