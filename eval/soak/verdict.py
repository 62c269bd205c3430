"""What scenarios find out, and the report on it: soak.md for people, soak.json for programs."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from eval.files import write_json, write_text
from eval.machine import machine_facts, versions

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    what: str
    passed: bool | None  # None: not decided, the figures are too few to tell
    found: str


Found = Iterator[Check | tuple[str, float]]
"""Checks, and figures as a name with its value."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one scenario."""

    scenario: str
    title: str
    checks: tuple[Check, ...]
    figures: dict[str, float]  # by name, which ends in its unit
    seconds: float

    @property
    def passed(self) -> bool | None:
        """False where one check failed; None where none did, and one was not decided."""
        return verdict(check.passed for check in self.checks)


def verdict(checks: Iterable[bool | None]) -> bool | None:
    """False where one is; None where none is, and one is not decided; else True."""
    found = set(checks)
    return False if False in found else None if None in found else True


def word(passed: bool | None) -> str:
    """A verdict for people."""
    return {True: "passed", False: "FAILED", None: "not decided"}[passed]


def write_report(folder: Path, config: str, findings: Iterable[Finding]) -> None:
    """Write soak.json and soak.md.

    Raises:
        FileError: they cannot be written.
    """
    found = tuple(findings)
    machine = {**machine_facts(), **versions("nvidia-pytriton", "torch")}
    record = {
        "format_version": FORMAT_VERSION,
        "config": config,
        "machine": machine,
        "scenarios": [
            {**dataclasses.asdict(finding), "passed": finding.passed} for finding in found
        ],
    }
    write_json(folder / "soak.json", record)
    write_text(folder / "soak.md", to_markdown(config, machine, found))


def to_markdown(config: str, machine: dict[str, str], findings: Iterable[Finding]) -> str:
    """The text of soak.md."""
    found = tuple(findings)
    lines = [f"# Soak: {config}", "", "| scenario | | what happened | took |", "|---|---|---|---|"]
    for finding in found:
        bad = [check for check in finding.checks if check.passed is not True]
        told = "; ".join(f"{check.what}: {check.found}" for check in bad or finding.checks)
        lines.append(
            f"| {finding.scenario} | {word(finding.passed)} | {_cell(told)} "
            f"| {finding.seconds:.0f} s |"
        )
    for finding in found:
        lines += ["", f"## {finding.scenario}: {finding.title}", ""]
        lines += [
            f"- {word(check.passed)}: {check.what}: {check.found}" for check in finding.checks
        ]
        if finding.figures:
            lines += ["", "| figure | |", "|---|---|"]
            lines += [f"| {name} | {value:,.3f} |" for name, value in finding.figures.items()]
    lines += ["", "## Machine", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
