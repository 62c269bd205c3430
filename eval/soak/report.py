"""Findings of scenarios, and the report on them: soak.md for people, beside the record."""

import dataclasses
from collections.abc import Iterator, Sequence

from eval.files import write_text
from eval.measurement import Check, Result, Run, Verdict, loud, verdict

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


def reported(run: Run, findings: Sequence[Finding]) -> Result:
    """Write soak.md and the record, anew after each scenario.

    Raises:
        FileError: they cannot be written.
    """
    markdown = to_markdown(run.config.name, run.machine, findings)
    path = run.folder / "soak.md"
    write_text(path, markdown)
    text = f"{markdown.partition(chr(10) + '## ')[0]}\nThe whole report: {path}"
    checks = tuple(check for finding in findings for check in finding.checks)
    result = Result({"scenarios": findings}, checks, text)
    run.keep(result)
    return result


def to_markdown(config: str, machine: dict[str, str], findings: Sequence[Finding]) -> str:
    """Return the text of soak.md."""
    lines = [f"# Soak: {config}", "", "| scenario | | what happened | took |", "|---|---|---|---|"]
    for finding in findings:
        bad = [check for check in finding.checks if check.passed is not True]
        summary = "; ".join(f"{check.name}: {check.detail}" for check in bad or finding.checks)
        lines.append(
            f"| {finding.scenario} | {loud(finding.verdict)} | {_cell(summary)} "
            f"| {finding.seconds:.0f} s |"
        )
    for finding in findings:
        lines += ["", f"## {finding.scenario}: {finding.title}", ""]
        lines += [
            f"- {loud(verdict([check]))}: {check.name}: {check.detail}" for check in finding.checks
        ]
        if finding.figures:
            lines += ["", "| figure | |", "|---|---|"]
            lines += [f"| {name} | {value:,.3f} |" for name, value in finding.figures.items()]
    lines += ["", "## Machine", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
