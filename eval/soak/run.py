"""`python -m eval soak`: everything at once, or scenarios, each on a server of its own."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from build.clips import load_clips
from eval.config import changed
from eval.record import Check, ReportSection, Result, Run, Table, Verdict, loud, verdict
from eval.soak import MIXED, SCENARIOS
from eval.soak.attacks import floods, killers
from eval.soak.jobs import jobs
from eval.soak.mixed import mixed
from eval.soak.overload import overload
from eval.soak.reloads import reloads
from eval.soak.scenarios import (
    LONG_LIMIT_S,
    SLOW_LIMIT_S,
    large_uploads,
    short_beside_long,
    slow_clients,
)
from eval.soak.stage import Found, SoakSettings, Stage, stage
from serve.contract.errors import ConfigError, EarshotError

_ENDS = "the scenario comes to its end"


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


def soak(
    run: Run, *, minutes: int, actions: int | None, seed: int, scenarios: Sequence[str] | None
) -> Result:
    """Attack a server, and keep the findings so far after each scenario and an interrupt.

    Args:
        run: the run; its config is the attacked product.
        minutes, actions, seed: as in `SoakSettings`.
        scenarios: names of `SCENARIOS`; () is all of them, None everything at once.

    Raises:
        ConfigError: there is no scenario of a name, or the clips cannot be used.
        FileError: the record cannot be written.
    """
    for name in scenarios or ():
        if name not in SCENARIOS:
            raise ConfigError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    clips, findings = tuple(load_clips(run.config.eval.manifest)), list[Finding]()
    settings = SoakSettings(run.config, clips, run.say, seed, minutes, actions)
    titles = {MIXED: "clients of every kind, hostile ones and disruptions at once", **SCENARIOS}
    for name in (MIXED,) if scenarios is None else scenarios or SCENARIOS:
        run.say(f"{name}: {titles[name]} …")
        began, checks, figures = time.monotonic(), list[Check](), dict[str, float]()
        try:
            for news in _SCENARIOS[name](settings):
                if isinstance(news, Check):
                    checks.append(news)
                else:
                    figures[news[0]] = float(news[1])
        except (EarshotError, OSError, psutil.Error) as error:
            checks.append(Check(_ENDS, False, str(error) or repr(error)))
        except BaseException:
            checks.append(Check(_ENDS, None, "interrupted"))
            raise
        finally:
            took_s = time.monotonic() - began
            findings.append(Finding(name, titles[name], tuple(checks), figures, took_s))
            result = _result(findings)
            run.keep(result)
        run.say(f"{name}: {loud(findings[-1].verdict)}")
    return result


def _result(findings: Sequence[Finding]) -> Result:
    rows, figures, checks = [], [], []
    for finding in findings:
        name, took = finding.scenario, f"{finding.seconds:.0f} s"
        bad = [f"{one.name}: {one.detail}" for one in finding.checks if one.passed is not True]
        summary = "; ".join(bad) or f"all {len(finding.checks)} checks passed"
        rows.append([name, loud(finding.verdict), took, summary])
        values = [[label, f"{value:,.3f}"] for label, value in finding.figures.items()]
        if values:
            table = Table(["figure", ""], values, note=f"{finding.title}.")
            figures.append(ReportSection(name, [table], printed=False))
        checks += [dataclasses.replace(one, name=f"{name}: {one.name}") for one in finding.checks]
    table = Table(["scenario", "", "took", "what happened"], rows, prose=True)
    sections = (ReportSection("Scenarios", [table]), *figures)
    return Result({"scenarios": findings}, tuple(checks), sections)


def _on_a_server(
    attack: Callable[[Stage], Found], **changes: dict[str, Any]
) -> Callable[[SoakSettings], Found]:
    """Return a scenario that attacks one server, with changed sections of the config."""

    def scenario(settings: SoakSettings) -> Found:
        config = settings.config
        for section, values in changes.items():
            config = changed(config, section, **values)
        with stage(dataclasses.replace(settings, config=config)) as running:
            yield from attack(running)
            yield from _stops(running)

    return scenario


def _stops(running: Stage) -> Found:
    ended = running.server.process.poll()
    if ended is not None:
        yield Check("the server runs to the end", False, f"exit status {ended}")
        return
    status, seconds = running.server.stop()
    yield "stopped after SIGTERM, s", seconds
    how = "killed, because it did not stop" if status is None else f"exit status {status}"
    yield Check("it stops when it is asked to", status is not None, how)


_SCENARIOS: dict[str, Callable[[SoakSettings], Found]] = {
    MIXED: mixed,
    "short-beside-long": _on_a_server(
        short_beside_long, transcriber={"request_timeout_s": LONG_LIMIT_S}
    ),
    "large-uploads": _on_a_server(large_uploads),
    "slow-clients": _on_a_server(slow_clients, server={"upload_timeout_s": SLOW_LIMIT_S}),
    "floods": _on_a_server(floods),
    "killers": _on_a_server(killers),
    "jobs": jobs,
    "overload": overload,
    "reload": _on_a_server(reloads),
}
