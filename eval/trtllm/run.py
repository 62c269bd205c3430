"""`python -m eval trtllm-check`: every check in a folder of its own, and the table at the end."""

import tempfile
from pathlib import Path

from eval.record import Result, Run
from eval.trtllm.check import build_by_command_line, run
from eval.trtllm.report import Report


def check(of: Run, *, python: str) -> Result:
    """Run every check.

    Args:
        of: shows what there is to read.
        python: of another environment that has the library; empty: this one.

    Raises:
        EarshotError: the first difference, once the table is out.
    """
    report = Report(of.show)
    with tempfile.TemporaryDirectory(prefix="earshot-trtllm-check-") as folder:
        try:
            run(Path(folder), report, build_by_command_line, python)
        finally:
            of.show(f"\n{report.table()}\n\nFor a bug report:\n{report.line()}")
    return Result()
