"""Evaluate Earshot, from the project's root; `python -m eval --help` lists the commands."""

import argparse
import pkgutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from eval.commands import COMMANDS, Command, Flags
from eval.config import EvaluationProduct, changed, load_config
from eval.record import Result, Run, verdict
from serve.contract.exits import exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 failed, 2 wrong usage, 130 interrupted."""
    options = vars(_parser().parse_args(arguments))
    return exit_status(
        lambda: _run(options.pop("command"), options),
        interrupted="\ninterrupted; what was finished is kept",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval", description="Measure accuracy, speed and robustness."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Flags)
    for command in COMMANDS:
        command.add(commands)
    return parser


def _run(command: Command, options: dict[str, Any]) -> int:
    """Load the config, run the command, keep its record, and tell the checks that failed."""
    path = options.pop("config", "")
    config = load_config(path) if path else EvaluationProduct()
    for place in [name for name in options if "." in name]:
        section, key = place.split(".")
        value = options.pop(place)
        config = changed(config, section, **({key: value} if key else value))
    record: Path | None = None
    if command.keeps_results:
        folder = options.pop("output") or command.reports(config.name)
        record = folder / f"{command.name}.json"
    run = Run(command.name, config, path, record, options.copy(), _say)
    try:
        result: Result = pkgutil.resolve_name(f"eval.{command.entry}")(run, **options)
        run.keep(result)
    finally:
        _report(run)
    for check in result.checks:
        if not check.passed:
            _say(str(check))
    return 1 if verdict(result.checks) == "failed" else 0


def _report(run: Run) -> None:
    """Write and print the report of the result that was kept last, also after an interrupt."""
    if run.result is None or not run.result.sections:
        return
    from eval import report  # noqa: PLC0415 - loads what few commands need

    print(report.to_markdown(run, run.result, whole=False))
    if run.path is not None:
        report.write(run.folder, run, run.result)
        print(f"The report: {run.folder / report.PAGE} and {report.MARKDOWN} beside it")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that servers end and the report is written."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
