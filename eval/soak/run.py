"""`python -m eval soak`: everything at once, or scenarios, each on a server of its own."""

import time
from collections.abc import Callable, Sequence

import psutil

from build.clips import Clip, load_clips
from eval.config import Config
from eval.record import Check, Result, Run, Say, loud
from eval.soak.crowds import forty_hours, short_beside_long, with_limit
from eval.soak.findings import Finding, Found, kept
from eval.soak.floods import floods
from eval.soak.killers import killers
from eval.soak.mixed import Load, mixed
from eval.soak.plan import SCENARIOS
from eval.soak.reloads import reloads
from eval.soak.stage import Stage, stage
from eval.soak.uploads import descriptors, large_uploads, slow_clients, with_short_uploads
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
        findings.append(attacked(name, run.config, clips, run.say))
        result = kept(run, findings)
        run.say(f"{name}: {loud(findings[-1].verdict)}")
    return result


def attacked(name: str, config: Config, clips: tuple[Clip, ...], say: Say) -> Finding:
    """Run one scenario on a server of its own; an error in it is a check that failed.

    Raises:
        EarshotError: the server did not start.
    """
    began = time.monotonic()
    if name in _CONFIGS:
        config = _CONFIGS[name](config)
    checks, figures = list[Check](), dict[str, float]()
    with stage(config, clips, say) as running:
        try:
            for news in _ATTACKS[name](running):
                if isinstance(news, Check):
                    checks.append(news)
                else:
                    figures[news[0]] = float(news[1])
        except (EarshotError, OSError, psutil.Error) as error:
            checks.append(Check("the scenario comes to its end", False, repr(error)))
        ended = running.process.poll()
        if ended is None:
            status, figures["stopped after SIGTERM, s"] = running.stop()
            how = "killed, for it did not stop" if status is None else f"exit status {status}"
            checks.append(Check("it stops when it is asked to", status is not None, how))
        else:
            checks.append(Check("the server runs to the end", False, f"exit status {ended}"))
    return Finding(name, SCENARIOS[name], tuple(checks), figures, time.monotonic() - began)
