"""`python -m eval trtllm-check`: every check in a folder of its own, and the table at the end."""

import tempfile
from pathlib import Path

from eval.trtllm.check import build_by_command_line, run
from eval.trtllm.report import Progress, Report


def check(progress: Progress, python: str) -> int:
    """Run every check; the exit code.

    Args:
        progress: called with what there is to read.
        python: of another environment that has the library; empty: this one.

    Raises:
        EarshotError: the first difference, once the table is out.
    """
    report = Report(progress)
    with tempfile.TemporaryDirectory(prefix="earshot-trtllm-check-") as folder:
        try:
            run(Path(folder), report, build_by_command_line, python)
        finally:
            progress(f"\n{report.table()}\n\nFor a bug report:\n{report.line()}")
    return 0
