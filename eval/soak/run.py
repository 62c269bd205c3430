"""`python -m eval soak`: everything at once, or scenarios, each on a server of its own."""

import time
from collections.abc import Callable, Sequence

import psutil

from build.clips import Clip, load_clips
from eval.config import Config
from eval.record import Check, Result, Run, Say, loud
from eval.soak.attacks import floods, killers
from eval.soak.jobs import jobs
from eval.soak.mixed import Load, mixed
from eval.soak.overload import overload
from eval.soak.plan import SCENARIOS
from eval.soak.reloads import reloads
from eval.soak.scenarios import (
    descriptors,
    forty_hours,
    large_uploads,
    short_beside_long,
    slow_clients,
    with_limit,
    with_short_uploads,
)
from eval.soak.stage import Finding, Found, Stage, kept, stage
from serve.contract.errors import ConfigError, EarshotError

Attack = Callable[[Stage], Found]
"""An attack on a server."""

_ATTACKS: dict[str, Attack] = {
    "short-beside-long": short_beside_long,
    "forty-hours": forty_hours,
    "large-uploads": large_uploads,
    "slow-clients": slow_clients,
    "descriptors": descriptors,
    "floods": floods,
    "killers": killers,
    "reload": reloads,
}
_OF_THEIR_OWN = {"jobs": jobs, "overload": overload}
"""Scenarios that start servers themselves."""

_CONFIGS: dict[str, Callable[[Config], Config]] = {
    "short-beside-long": with_limit,
    "forty-hours": with_limit,
    "slow-clients": with_short_uploads,
}


def soak(
    run: Run, *, minutes: int, actions: int | None, seed: int, scenarios: Sequence[str] | None
) -> Result:
    """Attack a server and write the report.

    Args:
        run: of the product that is attacked.
        minutes, actions, seed: as of `Load`.
        scenarios: names of `SCENARIOS` that are run instead; () is all of them.

    Raises:
        ConfigError: there is no scenario of a name, or the clips cannot be used.
        EarshotError: a server did not start.
        FileError: the report cannot be written.
    """
    if scenarios is None:
        return mixed(run, Load(minutes, actions, seed))
    for name in scenarios:
        if name not in SCENARIOS:
            raise ConfigError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    clips, findings = tuple(load_clips(run.config.eval.manifest)), list[Finding]()
    for name in scenarios or tuple(SCENARIOS):
        run.say(f"{name}: {SCENARIOS[name]} …")
        findings.append(attacked(name, run.config, clips, run.say, minutes=minutes, seed=seed))
        result = kept(run, findings)
        run.say(f"{name}: {loud(findings[-1].verdict)}")
    return result


def attacked(
    name: str,
    config: Config,
    clips: tuple[Clip, ...],
    say: Say,
    *,
    minutes: float = 5,
    seed: int = 0,
) -> Finding:
    """Run one scenario; an error in it is a check that failed.

    Raises:
        EarshotError: its server did not start.
    """
    began, checks, figures = time.monotonic(), list[Check](), dict[str, float]()

    def note(found: Found) -> None:
        try:
            for news in found:
                if isinstance(news, Check):
                    checks.append(news)
                else:
                    figures[news[0]] = float(news[1])
        except (EarshotError, OSError, psutil.Error) as error:
            checks.append(Check("the scenario comes to its end", False, repr(error)))

    if name in _OF_THEIR_OWN:
        note(_OF_THEIR_OWN[name](config, clips, say, minutes=minutes, seed=seed))
    else:
        config = _CONFIGS[name](config) if name in _CONFIGS else config
        with stage(config, clips, say) as running:
            note(_ATTACKS[name](running))
            ended = running.server.process.poll()
            if ended is None:
                status, figures["stopped after SIGTERM, s"] = running.server.stop()
                how = "killed, for it did not stop" if status is None else f"exit status {status}"
                checks.append(Check("it stops when it is asked to", status is not None, how))
            else:
                checks.append(Check("the server runs to the end", False, f"exit status {ended}"))
    return Finding(name, SCENARIOS[name], tuple(checks), figures, time.monotonic() - began)
