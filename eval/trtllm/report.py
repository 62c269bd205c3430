"""The report of `python -m eval trtllm-check`: a table, and a line to paste into a bug report."""

import contextlib
import dataclasses
from collections.abc import Iterator

from eval.record import Say, machine_facts, versions
from serve.contract.errors import EarshotError

_LINE_CHARACTERS = 500  # of a difference, in the line for a bug report


class DifferenceError(EarshotError):
    """TensorRT-LLM did something else than expected; the message says what."""


@dataclasses.dataclass
class Step:
    """A check under way, a row of the table."""

    what: str
    found: str = ""  # what a passed check saw, or the first difference
    passed: bool = False


class Report:
    """The checks that ran, and how they ended.

    Args:
        progress: called with a line for each check, as it ends.
    """

    def __init__(self, progress: Say) -> None:
        self.checks: list[Step] = []
        self._progress = progress

    @contextlib.contextmanager
    def check(self, what: str) -> Iterator[Step]:
        """Run a check, which passes unless its block raises.

        Raises:
            EarshotError: the block's.
            DifferenceError: the block raised something else: the library's own error, most likely.
        """
        check = Step(what)
        self.checks.append(check)
        try:
            yield check
        except EarshotError as error:
            check.found = str(error)
            raise
        except Exception as error:
            check.found = f"{type(error).__name__}: {error}"
            raise DifferenceError(f"{what}: {check.found}") from error
        check.passed = True
        self._progress(f"{what}: {check.found or 'pass'}")

    def table(self) -> str:
        """Tabulate versions and every check, a row each."""
        rows = [*_environment().items(), ("", "")]
        rows += [(c.what, f"{'pass' if c.passed else 'FAIL'}  {c.found}") for c in self.checks]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)

    def line(self) -> str:
        """Return the outcome and the versions in one line, to paste into a bug report."""
        failed = next((check for check in self.checks if not check.passed), None)
        outcome = f"pass, {len(self.checks)} checks"
        if failed is not None:
            outcome = f"FAIL at {failed.what}: {' '.join(failed.found.split())[:_LINE_CHARACTERS]}"
        return f"trtllm-check: {outcome} | " + ", ".join(map(" ".join, _environment().items()))


def _environment() -> dict[str, str]:
    """Return the versions that decide what the library does, and the machine."""
    facts = machine_facts()
    return {
        **versions("tensorrt_llm", "tensorrt", "torch", "transformers", "numpy", "pydantic"),
        **{name: facts[name] for name in ("Python", "GPU", "OS")},
    }
