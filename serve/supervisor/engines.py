"""Manage the engines of a server, one per device: their processes, reloads and idle unloads.

A chore is a long task: a generator that the supervisor's thread resumes at each poll. One chore
runs at a time. It replaces, unloads or loads the engines of all devices, so they never differ.

In a reload each new Triton gets its own folder, and its engine transcribes some clips. Then
the device's symbolic link is set to the new folder, and new requests go there. The previous Triton
ends when no gateway holds its folder any more. A failure before that changes nothing.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from serve.contract.config import Config
from serve.contract.devices import placements
from serve.contract.errors import EarshotError
from serve.supervisor.control import ReloadProgress, ReloadRequest, Report
from serve.supervisor.reload_checks import (
    ReloadClip,
    check_reload,
    error_rate,
    read_clips,
    require_memory,
    transcribe_clips,
)
from serve.supervisor.server import SupervisedTriton, TritonLaunch, prepare
from serve.wire.folder import USED, engine_links, remove_triton, triton_folder
from serve.wire.liveness import heartbeat_age_s, touch_heartbeat

logger = logging.getLogger("earshot")

TRITON = "Triton Inference Server"
_GRACE_S = 60.0  # time for a request beyond the transcriber's own limit

T = TypeVar("T")
Chore = Generator[None, None, T]


@dataclasses.dataclass
class EngineProcess:
    """The engine of a device."""

    name: str  # the device's
    link: Path  # symbolic link to the folder of the Triton that gets requests
    log: Path
    triton: SupervisedTriton

    def replace(self, triton: SupervisedTriton) -> None:
        """Continue with another Triton, which also counts the restarts of the earlier ones."""
        triton.restarts += self.triton.restarts
        self.triton = triton


class EngineManager:
    """The engines of a server. For one thread, except `ask` and the properties.

    Args:
        folder: the folder of the run.
        original: the config that the server was started with.
        config: the same config with absolute paths and with its devices resolved.
        engine: the engine's folder.
        log_path: the server's log; several engines have their own logs beside it.

    Raises:
        EarshotError: see `prepare`.
    """

    def __init__(
        self, folder: Path, original: Config, config: Config, engine: str, log_path: Path
    ) -> None:
        self._folder = folder
        self._original = original
        self._config = config
        self._numbers = itertools.count()
        self._used = folder / USED
        self._places = placements(config.runtime)
        self.all: list[EngineProcess] = []
        links = engine_links(folder, len(self._places))
        launches = self._prepare(engine, beside=False)
        for number, (place, link, launch) in enumerate(
            zip(self._places, links, launches, strict=True)
        ):
            log = Path(f"{log_path}.{number}") if len(self._places) > 1 else log_path
            log.write_bytes(b"")
            link.symlink_to(launch.folder)
            triton = self._supervised(place.name, launch, log)
            self.all.append(EngineProcess(place.name, link, log, triton))
        self._loaded = True
        self.reloads = {"ok": 0, "failed": 0}
        self._unloaded_s = 0.0  # time of the last unload
        self._others: list[SupervisedTriton] = []  # of a reload: starting, or finishing requests
        self._requests: list[tuple[ReloadRequest, Report]] = []
        self._chore: Chore[None] | None = None
        self._threads = ThreadPoolExecutor(2 * len(self._places), "earshot-engines")
        touch_heartbeat(self._used)

    # ------------------------------------------------------------ for any thread

    def ask(self, request: ReloadRequest, report: Report) -> None:
        """Queue a reload of the engines."""
        self._requests.append((request, report))

    @property
    def processes(self) -> tuple[SupervisedTriton, ...]:
        """All processes of the engines."""
        return (*(engine.triton for engine in self.all), *self._others)

    @property
    def ever_ready(self) -> bool:
        """Whether the first engine has been ready; the others start after it."""
        return self.all[0].triton.ever_ready

    def loaded(self, engine: EngineProcess) -> bool:
        """Return whether an engine is in memory."""
        return self._loaded and engine.triton.ever_ready

    def works(self, engine: EngineProcess) -> bool:
        """Return whether an engine works, or will be loaded at the next request."""
        return engine.triton.up or not self._loaded

    # ------------------------------------------------------------ for the supervisor's thread

    def poll(self) -> None:
        """Poll each engine that should run, and continue the present chore.

        The first engine starts alone, because it compiles the kernels for all of them.

        Raises:
            EarshotError: see `SupervisedProcess.poll`.
        """
        if self._loaded:
            for engine in self.all if self.ever_ready else self.all[:1]:
                engine.triton.poll()
        self.continue_chore()

    def continue_chore(self, draining: bool = False) -> None:
        """Continue the present chore, or begin the next one.

        Args:
            draining: whether only waiting requests are a reason to begin a chore.

        Raises:
            EarshotError: an unloaded engine cannot be loaded again.
        """
        self._chore = self._chore or self._next_chore(draining)
        if self._chore is not None:
            try:
                next(self._chore)
            except StopIteration:
                self._chore = None

    def close(self) -> None:
        """Kill all engines, and report that every queued reload has failed."""
        for process in self.processes:
            process.kill()
        if self._chore is not None:
            self._chore.close()
        while self._requests:
            self._requests.pop(0)[1](ReloadProgress("the server stops", done=True, failed=True))
        self._threads.shutdown(wait=False)

    def _next_chore(self, draining: bool) -> Chore[None] | None:
        if self._requests and not draining and all(engine.triton.ever_ready for engine in self.all):
            return self._reload(*self._requests.pop(0))
        idle_s, limit_s = heartbeat_age_s(self._used), self._config.server.idle_unload_s
        if not self._loaded:
            return self._load() if time.monotonic() - idle_s > self._unloaded_s else None
        if not all(engine.triton.up for engine in self.all):
            touch_heartbeat(self._used)  # the idle time begins when the engines are ready
            return None
        return self._unload() if 0 < limit_s < idle_s and not draining else None

    # ------------------------------------------------------------ chores

    def _reload(self, request: ReloadRequest, report: Report) -> Chore[None]:
        """Reload the engines and report the outcome."""
        reason = "the server stops"
        try:
            reason = yield from self._try_reload(request, lambda text: report(ReloadProgress(text)))
        finally:
            outcome = "failed" if reason else "ok"
            self.reloads[outcome] += 1
            text = f"the engine is now {request.engine}"
            if reason:
                text = f"the engine {request.engine} was rejected: {reason}"
            logger.warning("%s", text)
            report(ReloadProgress(text, done=True, failed=bool(reason)))

    def _try_reload(self, request: ReloadRequest, say: Callable[[str], object]) -> Chore[str]:
        """Reload the engines; return why this failed, or an empty text."""
        was_loaded, launches = self._loaded, list[TritonLaunch]()
        try:
            clips = self._check(request)
            if request.in_place and was_loaded:
                say("unloading the old engine; requests wait")
                yield from self._unload()
            launches = self._prepare(request.engine, beside=self._loaded)
            say(f"opening {request.engine}")
            tritons = yield from self._open(launches, request, clips, say)
        except (EarshotError, OSError) as error:
            self._discard(launches)
            if was_loaded and not self._loaded:
                say("loading the old engine again")
                yield from self._load()
            return str(error)
        say("new requests go to the new engine; the old one finishes its requests")
        old = [engine.triton for engine in self.all]
        self._others = old if self._loaded else []
        for engine, triton in zip(self.all, tritons, strict=True):
            engine.replace(triton)
        self._link()
        yield from self._end(self._others)
        self._discard(triton.launch for triton in old)
        return ""

    def _check(self, request: ReloadRequest) -> list[ReloadClip]:
        """Check the request without opening the engine; return the clips to transcribe.

        Raises:
            EarshotError: the engine cannot replace the present one.
        """
        check_reload(self._original, request, self.all[0].triton.launch.engine)
        if not request.in_place and self._loaded:
            running = (engine.triton.running for engine in self.all)
            require_memory([process.pid for process in running if process is not None])
        return read_clips(request.clips) if request.clips else []

    def _open(
        self,
        launches: Sequence[TritonLaunch],
        request: ReloadRequest,
        clips: Sequence[ReloadClip],
        say: Callable[[str], object],
    ) -> Chore[list[SupervisedTriton]]:
        """Start a Triton for each device in turn, and transcribe the clips with each.

        Raises:
            EarshotError: one of them does not work.
        """
        tritons: list[SupervisedTriton] = []
        self._others = tritons
        for engine, launch in zip(self.all, launches, strict=True):
            triton = self._supervised(engine.name, launch, engine.log)
            tritons.append(triton)
            while not triton.up:
                triton.poll()
                yield
            timeout_s = self._config.server.start_timeout_s
            future = self._threads.submit(transcribe_clips, launch.folder, clips, timeout_s)
            try:
                (texts,) = yield from self._wait([future])
            except EarshotError as error:
                raise EarshotError(triton.failure() or str(error)) from error
            if clips:
                cer = error_rate(clips, texts, request.max_cer)
                say(f"{engine.name}: CER {100 * cer:.1f} % on {len(clips)} clips")
            else:
                say(f"{engine.name}: open; not checked, because there are no clips (--clips)")
        for triton in tritons:
            if reason := triton.failure():
                raise EarshotError(reason)
        return tritons

    def _unload(self) -> Chore[None]:
        """Make new requests wait, and end the engines after their present requests."""
        for engine in self.all:
            engine.link.unlink()
        self._loaded, self._unloaded_s = False, time.monotonic()
        yield from self._end([engine.triton for engine in self.all])

    def _load(self) -> Chore[None]:
        """Start the unloaded engines and give them the waiting requests.

        Raises:
            EarshotError: they cannot be started after all retries.
        """
        for engine in self.all:
            engine.replace(self._supervised(engine.name, engine.triton.launch, engine.log))
            engine.triton.ever_ready = True  # it has been ready, so a failure restarts it
        while not all(engine.triton.up for engine in self.all):
            for engine in self.all:
                engine.triton.poll()
            yield
        self._link()

    def _end(self, tritons: Sequence[SupervisedTriton]) -> Chore[None]:
        """End Tritons that get no more requests, after their present requests."""
        deadline_s = time.monotonic() + self._config.transcriber.request_timeout_s + _GRACE_S
        while time.monotonic() < deadline_s and any(triton.has_requests() for triton in tritons):
            yield
        yield from self._wait([self._threads.submit(triton.stop) for triton in tritons])

    @staticmethod
    def _wait(futures: Sequence[Future[T]]) -> Chore[list[T]]:
        while not all(future.done() for future in futures):
            yield
        return [future.result() for future in futures]

    # ------------------------------------------------------------ steps

    def _prepare(self, engine: str, beside: bool) -> list[TritonLaunch]:
        launches, count = [], len(self._places)
        folders = [triton_folder(self._folder, next(self._numbers)) for _ in self._places]
        try:
            for place, folder in zip(self._places, folders, strict=True):
                folder.mkdir(mode=0o700)
                config = dataclasses.replace(self._config, runtime=place.runtime)
                launches.append(prepare(folder, config, engine, place.environment, count, beside))
        except BaseException:
            for folder in folders:
                remove_triton(folder)
            raise
        return launches

    def _supervised(self, name: str, launch: TritonLaunch, log: Path) -> SupervisedTriton:
        title = f"{TRITON} of {name}" if len(self._places) > 1 else TRITON
        return SupervisedTriton(
            title, launch, log, lambda: not any(engine.triton.up for engine in self.all)
        )

    def _link(self) -> None:
        for engine in self.all:
            new = engine.link.with_name(f"{engine.link.name}.new")
            new.symlink_to(engine.triton.launch.folder)
            new.replace(engine.link)
        touch_heartbeat(self._used)
        self._loaded = True

    def _discard(self, launches: Iterable[TritonLaunch]) -> None:
        """End the Tritons of a reload that are not used, and remove these folders."""
        for triton in self._others:
            triton.kill()
        self._others = []
        for launch in launches:
            remove_triton(launch.folder)
