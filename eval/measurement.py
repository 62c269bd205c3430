"""Every command of `python -m eval` is a measurement: a run with flags, figures and checks.

A command is a function that is given a `Run` and its flags by name, and returns a `Result`.
`eval/commands.py` lists them all. The record of a run is one JSON file:

format_version, command, config   what was run
machine, versions, settings       on what, with what, and how
figures                           what was found
checks, verdict                   what must hold of it
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from eval.config import Config
from eval.files import write_json
from eval.machine import machine_facts, versions

FORMAT_VERSION = 1
_SOFTWARE = (
    "torch",
    "triton",
    "nvidia-pytriton",
    "ray",
    "transformers",
    "faster-whisper",
    "ctranslate2",
    "vllm",
)

Say = Callable[[str], object]
"""Gets a line of progress at a time."""

Verdict = Literal["passed", "failed", "not decided"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that must hold; `passed` is None where it could not be decided."""

    name: str
    passed: bool | None
    detail: str  # what was found, or why nothing could be

    def __str__(self) -> str:
        """Write a line."""
        return f"{loud(verdict([self]))}: {self.name}. {self.detail}"


def verdict(checks: Iterable[Check]) -> Verdict:
    """Judge checks: failed where one did, passed where every one did."""
    outcomes = {check.passed for check in checks}
    if False in outcomes:
        return "failed"
    return "not decided" if None in outcomes else "passed"


def loud(verdict: Verdict) -> str:
    """Write a verdict, of which a failure cannot be overlooked."""
    return verdict.upper() if verdict == "failed" else verdict


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table whose columns also line up as plain text; numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "-" * (widths[0] + 2) + "|" + "|".join("-" * (w + 1) + ":" for w in widths[1:])
    return "\n".join([line(header), rule + "|", *(line(row) for row in rows)])


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        figures: dataclasses, or plain values that hold some.
        checks: what must hold of them.
        text: the report, as it is printed.
    """

    figures: Any = None
    checks: tuple[Check, ...] = ()
    text: str = ""


@dataclasses.dataclass
class Run:
    """All that a command is given besides its flags."""

    command: str
    config: Config
    config_path: str = ""  # where that was read
    path: Path | None = None  # of the record; None: nowhere
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)  # as the record tells them
    say: Say = print  # gets lines of progress
    show: Say = print  # gets lines of the report that are printed before the run ends

    @functools.cached_property
    def machine(self) -> dict[str, str]:
        """Describe the hardware; a run that knows more of it adds that."""
        return machine_facts()

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """Return the versions of what the figures depend on most; likewise."""
        return versions(*_SOFTWARE)

    @property
    def folder(self) -> Path:
        """Return where results go."""
        assert self.path is not None, f"{self.command} has no --output"
        return self.path.parent

    def record(self, result: Result) -> dict[str, Any]:
        """Return the fields of the record."""
        config = self.config
        return {
            "format_version": FORMAT_VERSION,
            "command": self.command,
            "config": config.name,
            "machine": self.machine,
            "versions": self.versions,
            "settings": {
                **self.flags,
                "precision": config.build.precision,
                "runtime": config.runtime,
                "transcriber": config.transcriber,
                "live": config.live,
                "eval": config.eval,
            },
            "figures": result.figures,
            "checks": result.checks,
            "verdict": verdict(result.checks),
        }

    def keep(self, result: Result) -> None:
        """Write what was found so far, in place of what was kept before.

        Raises:
            FileError: it cannot be written.
        """
        if self.path is not None and result.figures is not None:
            write_json(self.path, self.record(result))
