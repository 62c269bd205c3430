"""The record of a command: figures, checks, and the report's sections.

A command is a function that takes a `Run` and its flags by name, and returns a `Result`. The record
is one JSON file, `<command>.json`:

format_version, command, config   the command and its config's name
machine, versions, settings       the conditions
figures                           the measured values
checks, verdict                   the conditions that the figures must meet
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from eval.config import EvaluationProduct
from serve.contract.codec import from_json, to_json
from serve.contract.errors import FileError
from serve.contract.files import read_text

FORMAT_VERSION = 1
_SOFTWARE = (
    *("torch", "triton", "nvidia-pytriton", "ray"),
    *("transformers", "faster-whisper", "ctranslate2", "vllm"),
)
_LOAD_S = 1.0  # for which the load is measured
_QUIET_CORES = 0.2  # that other programs may keep busy
T = TypeVar("T")

Say = Callable[[str], object]
"""Receives one line of progress."""

Verdict = Literal["passed", "failed", "not decided"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One condition that must hold; `passed` is None if it could not be decided."""

    name: str
    passed: bool | None
    detail: str  # the measured value, or the reason why there is none

    def __str__(self) -> str:
        """Write one line."""
        return f"{loud(verdict([self]))}: {self.name}. {self.detail}"


def verdict(checks: Iterable[Check]) -> Verdict:
    """Return "failed" if a check failed, "passed" if every check passed, else "not decided"."""
    outcomes = {check.passed for check in checks}
    if False in outcomes:
        return "failed"
    return "not decided" if None in outcomes else "passed"


def loud(verdict: Verdict) -> str:
    """Write a verdict; a failure in capital letters."""
    return verdict.upper() if verdict == "failed" else verdict


# ---------------------------------------------------------------- sections of a report


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, or a list of them; names in backticks become code."""

    text: str
    title: str = ""
    items: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text; the first column is a name, the others are numbers.

    Attributes:
        header: one cell for each column; () makes a list of names and values.
        folded: whether the page shows it only after a click: "open" shows it.
        prose: whether long cells wrap.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    folded: Literal["", "closed", "open"] = ""
    prose: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """Charts of `eval.figures` side by side, with a legend; Markdown leaves them out."""

    charts: Sequence[Any]
    title: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class SharedTranscript:
    """The same transcript of one clip by some systems.

    Attributes:
        systems: their names.
        parts: reference and transcript, aligned; both are equal where nothing was misheard.
        error: of a call that failed.
    """

    systems: tuple[str, ...]
    parts: Sequence[tuple[str, str]]
    error: str | None

    @property
    def right(self) -> bool:
        """Return whether nothing was misheard."""
        return all(said == heard for said, heard in self.parts)


@dataclasses.dataclass(frozen=True)
class ReportClip:
    """One clip with a player and its transcripts, for the page alone."""

    title: str
    about: str
    reference: str  # as written
    transcripts: tuple[SharedTranscript, ...]
    audio: str | None  # a data: address
    no_audio: str | None  # the reason why there is no player


Part = Text | Table | Figure | ReportClip


@dataclasses.dataclass(frozen=True)
class ReportSection:
    """One titled part of a report.

    Attributes:
        title: stands in the page's navigation.
        parts: shown in this order.
        printed: whether the command prints it, too.
    """

    title: str
    parts: Sequence[Part]
    printed: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command.

    Attributes:
        figures: dataclasses, or plain values that hold some; None keeps no record.
        checks: the conditions that must hold.
        sections: the report's sections; `eval.report` writes them.
        title: the report's title; "" is the command and its config.
        about: the line below the title.
        notes: lines below the checks.
    """

    figures: Any = None
    checks: tuple[Check, ...] = ()
    sections: tuple[ReportSection, ...] = ()
    title: str = ""
    about: str = ""
    notes: tuple[Part, ...] = ()


CONDITIONS = "Conditions"
"""Title of the section on machine, versions and settings, which a report must have."""


@dataclasses.dataclass
class Run:
    """Everything that a command receives besides its flags."""

    command: str
    config: EvaluationProduct
    config_path: str = ""
    path: Path | None = None  # of the record; None: no record is kept
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)  # as the record has them
    say: Say = print  # receives lines of progress
    show: Say = print  # receives lines of the report that are printed before the command ends
    result: Result | None = None  # that was kept last

    @functools.cached_property
    def machine(self) -> dict[str, str]:
        """Describe the hardware and the software below; a command adds what it knows."""
        return {
            "CPU": _cpu_model(),
            "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
            "RAM": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
            "GPU": _gpu(),
            "OS": platform.platform(),
            "Python": platform.python_version(),
        }

    @functools.cached_property
    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that decide the figures; a command adds others."""
        return versions(*_SOFTWARE)

    @property
    def folder(self) -> Path:
        """Return the folder of results."""
        assert self.path is not None, f"{self.command} has no --output"
        return self.path.parent

    def keep(self, result: Result) -> None:
        """Write the record of a result, final or not, in place of the former one.

        Raises:
            FileError: the record cannot be written.
        """
        self.result = result
        if self.path is None or result.figures is None:
            return
        config = self.config
        record = {
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
        write_json(self.path, record)

    def conditions(self) -> ReportSection:
        """Return the section on machine, versions and settings."""
        settings = {**self.flags, **vars(self.config.runtime), **vars(self.config.transcriber)}
        known = {
            name: value
            for name, value in settings.items()
            if value is not None and not dataclasses.is_dataclass(value)
        }
        tables = (
            facts("Machine", self.machine),
            facts("Versions", self.versions),
            facts("Settings", known, "closed"),
        )
        return ReportSection(CONDITIONS, tables, printed=False)


def facts(title: str, values: dict[str, Any], folded: Literal["", "closed"] = "") -> Table:
    """Return a list of names and values."""
    return Table((), [(key, str(value)) for key, value in values.items()], title, folded=folded)


# ---------------------------------------------------------------- machine


def load_line() -> str:
    """Tell the load of other programs, and warn if times are not worth measuring."""
    cores = os.cpu_count() or 1
    busy_cores = psutil.cpu_percent(_LOAD_S) / 100 * cores  # while this process waits
    line = f"other programs keep {busy_cores:.1f} of {cores} cores busy"
    if busy_cores < _QUIET_CORES:
        return line
    return f"warning: {line}; times that are measured now say little: end those programs first"


def missing_packages(names: Iterable[str]) -> list[str]:
    """List which of these packages, by import name, are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def versions(*distributions: str) -> dict[str, str]:
    """Return the version of each distribution, or "none" if it is not installed."""
    by_name = {}
    for name in distributions:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_name[name] = "none"
    return by_name


def _cpu_model() -> str:
    # psutil and platform do not know a CPU's name on Linux.
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else "none"


# ---------------------------------------------------------------- files


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the path of a file beside this one, which takes its place when the block succeeds.

    Raises:
        FileError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Create a folder atomically, unless it exists; `make` fills a temporary folder beside it."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="composing-", dir=folder.parent, ignore_cleanup_errors=True
    ) as partial:
        make(Path(partial))
        os.replace(partial, folder)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises as `replaced`."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write dataclasses, or plain values that hold some, as JSON; raises as `write_text`."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_jsonl(path: Path, values: Iterable[Any]) -> None:
    """Write dataclasses as JSON, one a line; raises as `replaced`."""
    write_text(path, "".join(to_json(value) + "\n" for value in values))


def read_jsonl(path: Path, kind: type[T], expected: str, advice: str = "") -> list[T]:
    """Read what `write_jsonl` wrote.

    Raises:
        FileError: it cannot be read; `expected` is in the message.
        ConfigError: a line is no `kind`; the message names the line and ends with the advice.
    """
    return [
        from_json(kind, line, f"{path}:{number}", advice=advice, extra="ignore")
        for number, line in enumerate(read_text(path, expected).split("\n"), 1)
        if line
    ]


def read_json(path: Path, kind: type[T], content: str) -> T:
    """Read what `write_json` wrote.

    Raises:
        FileError: it cannot be read.
        ConfigError: it holds something else; the message names the expected `content`.
    """
    expected = f"expected {content}"
    text = read_text(path, expected)
    return from_json(kind, text, str(path), advice=expected, extra="ignore")
