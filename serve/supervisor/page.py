"""The supervisor's metrics, which the gateway adds to its metrics page."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from serve.supervisor.engines import EngineManager, EngineProcess
from serve.supervisor.supervised_process import SupervisedProcess
from serve.wire.folder import SUPERVISOR_PAGE

logger = logging.getLogger("earshot")


class SupervisorMetrics:
    """The supervisor's metrics file, written when it changes.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUPERVISOR_PAGE
        self._page = self._unwritten = ""

    def write(self, page: str) -> None:
        """Write the file; log the first failure."""
        if page == self._page:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(page, encoding="utf-8")
            new.replace(self._path)
        except OSError as error:  # for example a full disk; the next poll tries again
            if page != self._unwritten:
                logger.warning("cannot write the supervisor's metrics: %s", error)
            self._unwritten = page
        else:
            self._page = page


def page_of(
    engines: EngineManager,
    gateways: Iterable[SupervisedProcess],
    reference: SupervisedProcess | None = None,
) -> str:
    """Render the metrics of a server's processes; the shadow reference counts as an engine."""
    gateways, every = tuple(gateways), engines.all
    up = any(part.up for part in gateways) and any(map(engines.works, every))
    return (
        "# HELP earshot_restarts_total Restarts of a process\n"
        "# TYPE earshot_restarts_total counter\n"
        + "".join(
            f'earshot_restarts_total{{part="server",device="{engine.name}"}} {engine.restarts}\n'
            for engine in every
        )
        + _of_reference("earshot_restarts_total", 'part="server",', reference, "restarts")
        + f'earshot_restarts_total{{part="gateway"}} {sum(part.restarts for part in gateways)}\n'
        "# HELP earshot_up Whether the gateway and at least one engine work\n"
        f"# TYPE earshot_up gauge\nearshot_up {int(up)}\n"
        "# HELP earshot_engine_up Whether the engine of a device works, or is unloaded while idle\n"
        "# TYPE earshot_engine_up gauge\n"
        + _by_device("earshot_engine_up", engines, engines.works)
        + _of_reference("earshot_engine_up", "", reference, "up")
        + "# HELP earshot_engine_loaded Whether the engine of a device is in memory\n"
        "# TYPE earshot_engine_loaded gauge\n"
        + _by_device("earshot_engine_loaded", engines, engines.loaded)
        + "# HELP earshot_reloads_total Reloads of the engine\n"
        "# TYPE earshot_reloads_total counter\n"
        + "".join(
            f'earshot_reloads_total{{outcome="{outcome}"}} {count}\n'
            for outcome, count in engines.reloads.items()
        )
    )


def _by_device(name: str, engines: EngineManager, tell: Callable[[EngineProcess], bool]) -> str:
    return "".join(
        f'{name}{{device="{engine.name}"}} {int(tell(engine))}\n' for engine in engines.all
    )


def _of_reference(name: str, labels: str, part: SupervisedProcess | None, attribute: str) -> str:
    if part is None:
        return ""
    return f'{name}{{{labels}device="shadow"}} {int(getattr(part, attribute))}\n'
