"""`python -m eval soak`: everything at once, or scenarios, each on its own servers."""

import dataclasses
import pkgutil
import time
from collections.abc import Sequence

import httpx2
import psutil

from build.clips import load_clips
from eval.record import Check, ReportSection, Result, Run, Table, loud, verdict
from eval.soak import MIXED, SCENARIOS
from eval.soak.stage import SoakFigure, Stage, shown
from serve.contract.errors import EarshotError


@dataclasses.dataclass(frozen=True)
class ScenarioResult:
    """The outcome of one scenario."""

    scenario: str
    title: str
    figures: tuple[SoakFigure, ...]
    seconds: float


def soak(run: Run, *, minutes: int, seed: int, scenarios: Sequence[str] | None) -> Result:
    """Attack servers; keep the findings so far after each scenario and an interrupt.

    Args:
        run: the run; its config is the attacked product.
        minutes: the duration of `mixed`, and of the other scenarios that have one.
        seed: the seed of the clients' actions.
        scenarios: names of `SCENARIOS`; () is all but `mixed`, None `mixed` alone.

    Raises:
        ConfigError: the clips cannot be used.
        FileError: the record cannot be written.
    """
    clips, findings = tuple(load_clips(run.config.eval.manifest)), list[ScenarioResult]()
    others = [name for name in SCENARIOS if name != MIXED]
    for name in [MIXED] if scenarios is None else scenarios or others:
        entry, title = SCENARIOS[name]
        run.say(f"{name}: {title} …")
        stage, began_s = Stage(run.config, clips, run.say, seed, minutes), time.monotonic()
        try:
            pkgutil.resolve_name(f"eval.soak.{entry}")(stage)
        except (EarshotError, OSError, psutil.Error, httpx2.TransportError) as error:
            stage.none_of("scenario ended early", [error or repr(error)])
        except BaseException:
            stage.add("scenario ended early", 1, "at most 0", None, "interrupted")
            raise
        finally:
            stage.apply_rules()
            took_s = time.monotonic() - began_s
            findings.append(ScenarioResult(name, title, tuple(stage.figures), took_s))
            result = _result(findings)
            run.keep(result)
        run.say(f"{name}: {loud(verdict(stage.figures))}")
    return result


def _result(findings: Sequence[ScenarioResult]) -> Result:
    sections, checks = [], list[Check]()
    for finding in findings:
        name, figures = finding.scenario, finding.figures
        broken = [figure for figure in figures if figure.limit and not figure.passed]
        for figure in broken:
            parts = filter(None, (shown(figure.value), figure.limit, figure.detail))
            checks.append(Check(f"{name}: {figure.name}", figure.passed, ", ".join(parts)))
        checks += [] if broken else [Check(name, True, "all limits are kept")]
        rows = []
        for figure in figures:
            outcome = loud(verdict([figure])) if figure.limit else ""
            rows.append([figure.name, shown(figure.value), figure.limit, outcome])
        title = f"{name}: {loud(verdict(figures))} after {finding.seconds:.0f} s"
        table = Table(["figure", "value", "limit", "verdict"], rows, note=finding.title)
        sections.append(ReportSection(title, [table]))
    return Result({"scenarios": findings}, tuple(checks), tuple(sections))
