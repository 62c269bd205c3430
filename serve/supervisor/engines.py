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
from serve.contract.devices import DevicePlacement, placements
from serve.contract.errors import ConfigError, EarshotError
from serve.supervisor.control import ReloadProgress, ReloadRequest, Tell
from serve.supervisor.reload_checks import (
    ReloadClip,
    check_reload,
    hear,
    read_clips,
    require_memory,
    require_right,
)
from serve.supervisor.server import TritonLaunch, TritonServer, prepare
from serve.supervisor.supervised_process import SupervisedProcess
from serve.wire.folder import USED, engine_links, is_held, remove_triton, triton_folder
from serve.wire.liveness import heartbeat_age_s, touch_heartbeat

logger = logging.getLogger("earshot")

TRITON = "Triton Inference Server"
_GRACE_S = 60.0  # time for a request beyond the transcriber's own limit

T = TypeVar("T")
Chore = Generator[None, None, T]


@dataclasses.dataclass
class EngineProcess:
    """The engine of a device."""

    place: DevicePlacement
    link: Path  # symbolic link to the folder of the Triton that gets requests
    log: Path
    launch: TritonLaunch  # starts it, and restarts it
    part: SupervisedProcess
    former_restarts: int = 0  # restarts of the engines before it

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def restarts(self) -> int:
        """Return the number of restarts, with those of earlier engines."""
        return self.former_restarts + self.part.restarts


class EngineManager:
    """The engines of a server. For one thread, except `kill`, `ask` and the properties.

    Args:
        folder: the folder of the run.
        config: the config that the server was started with.
        counted: the same config with absolute paths and with its devices resolved.
        engine: the engine's folder.
        log_path: the server's log; several engines have their own logs beside it.

    Raises:
        EarshotError: see `prepare`.
    """

    def __init__(
        self, folder: Path, config: Config, counted: Config, engine: str, log_path: Path
    ) -> None:
        self._folder = folder
        self._asked = config
        self._config = counted
        self._numbers = itertools.count()
        self._used = folder / USED
        self._timeout_s = counted.server.start_timeout_s
        places = placements(counted.runtime)
        self._several = len(places) > 1
        self.all: list[EngineProcess] = []
        launches = self._prepare(places, engine, beside=False)
        links = engine_links(folder, len(places))
        for number, (place, link, launch) in enumerate(zip(places, links, launches, strict=True)):
            log = Path(f"{log_path}.{number}") if self._several else log_path
            log.write_bytes(b"")
            link.symlink_to(launch.folder)
            part = self._part(place.name, launch, log)
            self.all.append(EngineProcess(place, link, log, launch, part))
        self._loaded = True
        self.reloads = {"ok": 0, "failed": 0}
        self._unloaded_s = 0.0  # time of the last unload
        self._others: list[SupervisedProcess] = []  # starting, or draining their requests
        self._requests: list[tuple[ReloadRequest, Tell]] = []
        self._chore: Chore[None] | None = None
        self._threads = ThreadPoolExecutor(2 * len(places), "earshot-engines")
        touch_heartbeat(self._used)

    # ------------------------------------------------------------ for any thread

    def ask(self, order: ReloadRequest, tell: Tell) -> None:
        """Queue a reload of the engines."""
        self._requests.append((order, tell))

    @property
    def parts(self) -> tuple[SupervisedProcess, ...]:
        """All processes of the engines."""
        return (*(engine.part for engine in self.all), *self._others)

    @property
    def ever_ready(self) -> bool:
        """Whether the first engine has been ready; the others start after it."""
        return self.all[0].part.ever_ready

    def loaded(self, engine: EngineProcess) -> bool:
        """Return whether an engine is in memory."""
        return self._loaded and engine.part.ever_ready

    def works(self, engine: EngineProcess) -> bool:
        """Return whether an engine works, or will be loaded at the next request."""
        return engine.part.up or not self._loaded

    # ------------------------------------------------------------ for the supervisor's thread

    def look(self) -> None:
        """Poll each engine that should run, and continue the present chore.

        Raises:
            EarshotError: see `SupervisedProcess.look`.
        """
        if self._loaded:
            for engine in self.all if self.ever_ready else self.all[:1]:
                engine.part.look()
        self.go_on()

    def go_on(self, draining: bool = False) -> None:
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
        """Kill all engines, and end every queued reload."""
        for part in self.parts:
            part.kill()
        if self._chore is not None:
            self._chore.close()
        while self._requests:
            self._requests.pop(0)[1](ReloadProgress("the server stops", done=True, failed=True))
        self._threads.shutdown(wait=False)

    def _next_chore(self, draining: bool) -> Chore[None] | None:
        if self._requests and not draining and all(engine.part.ever_ready for engine in self.all):
            return self._reload(*self._requests.pop(0))
        idle_s, most_s = heartbeat_age_s(self._used), self._config.server.idle_unload_s
        if not self._loaded:
            return self._load() if time.monotonic() - idle_s > self._unloaded_s else None
        if not all(engine.part.up for engine in self.all):
            touch_heartbeat(self._used)  # the idle time begins when the engines are ready
            return None
        return self._unload() if 0 < most_s < idle_s and not draining else None

    # ------------------------------------------------------------ chores

    def _reload(self, order: ReloadRequest, tell: Tell) -> Chore[None]:
        """Reload the engines and report the outcome."""
        refusal = "the server stops"
        try:
            refusal = yield from self._try_reload(order, lambda text: tell(ReloadProgress(text)))
        finally:
            self.reloads["failed" if refusal else "ok"] += 1
            if refusal:
                logger.warning("the engine %s was rejected: %s", order.engine, refusal)
                text = f"{order.engine} was rejected: {refusal}"
                tell(ReloadProgress(text, done=True, failed=True))
            else:
                logger.warning("the engine is now %s", order.engine)
                tell(ReloadProgress(f"the engine is now {order.engine}", done=True))

    def _try_reload(self, order: ReloadRequest, say: Callable[[str], object]) -> Chore[str]:
        """Reload the engines; return why this failed, or an empty text."""
        was_loaded, launches = self._loaded, list[TritonLaunch]()
        before = [engine.launch for engine in self.all]
        try:
            clips = yield from self._checked(order)
            if order.in_place and was_loaded:
                say("unloading the old engine; requests wait")
                yield from self._unload()
            launches = self._prepare(self._places, order.engine, beside=self._loaded)
            say(f"opening {order.engine}")
            parts = yield from self._open(launches, order, clips, say)
        except (EarshotError, OSError) as error:
            self._discard(launches)
            if was_loaded and not self._loaded:
                say("loading the old engine again")
                yield from self._load()
            return str(error)
        say("new requests go to the new engine; the old one finishes its requests")
        yield from self._end(self._replace(launches, parts))
        self._discard(before)
        return ""

    def _checked(self, order: ReloadRequest) -> Chore[list[ReloadClip]]:
        """Check the request without opening the engine; return the clips to transcribe.

        Raises:
            EarshotError: the engine cannot replace the present one.
        """
        check_reload(self._asked, order, self.all[0].launch.engine)
        if not order.in_place and self._loaded:
            require_memory([engine.part.running for engine in self.all])
        clips = read_clips(order.clips) if order.clips else []
        if any(clip.text is None for clip in clips):
            if not self._loaded:
                raise ConfigError(
                    f"{order.clips} has clips without a text, and the present engine, which could "
                    "transcribe them, is unloaded; add a text to each clip"
                )
            texts = yield from self._transcribe_clips(self.all[0].launch, clips)
            clips = [
                dataclasses.replace(clip, text=text if clip.text is None else clip.text)
                for clip, text in zip(clips, texts, strict=True)
            ]
        return clips

    def _open(
        self,
        launches: Sequence[TritonLaunch],
        order: ReloadRequest,
        clips: Sequence[ReloadClip],
        say: Callable[[str], object],
    ) -> Chore[list[SupervisedProcess]]:
        """Start a Triton for each device in turn, and transcribe the clips with each.

        Raises:
            EarshotError: one of them does not work.
        """
        parts = []
        for engine, launch in zip(self.all, launches, strict=True):
            part = self._part(engine.name, launch, engine.log)
            parts.append(part)
            self._others.append(part)
            while not part.up:
                part.look()
                yield
            try:
                texts = yield from self._transcribe_clips(launch, clips)
            except EarshotError as error:
                raise EarshotError(_failure(part) or str(error)) from error
            if clips:
                cer = require_right(clips, texts, order.max_cer)
                say(f"{engine.name}: CER {100 * cer:.1f} % on {len(clips)} clips")
            else:
                say(f"{engine.name}: open; not checked, because there are no clips (--clips)")
        for reason in filter(None, map(_failure, parts)):
            raise EarshotError(reason)
        return parts

    def _unload(self) -> Chore[None]:
        """Make new requests wait, and end the engines after their present requests."""
        for engine in self.all:
            engine.link.unlink()
        self._loaded, self._unloaded_s = False, time.monotonic()
        old = [(engine.launch, engine.part) for engine in self.all]
        self._others += [engine.part for engine in self.all]
        yield from self._end(old)

    def _load(self) -> Chore[None]:
        """Start the unloaded engines and give them the waiting requests.

        Raises:
            EarshotError: they cannot be started after all retries.
        """
        for engine in self.all:
            restarts = engine.restarts
            engine.part = self._part(engine.name, engine.launch, engine.log)
            engine.former_restarts = restarts
            engine.part.ever_ready = True  # it has been ready, so a failure restarts it
        while not all(engine.part.up for engine in self.all):
            for engine in self.all:
                engine.part.look()
            yield
        self._link()

    def _end(self, old: Sequence[tuple[TritonLaunch, SupervisedProcess]]) -> Chore[None]:
        """End Tritons that get no more requests, after their present requests."""
        end_s = time.monotonic() + self._config.transcriber.request_timeout_s + _GRACE_S
        while time.monotonic() < end_s and any(_answers(*each) for each in old):
            yield
        yield from self._wait([self._threads.submit(_stop, part) for _, part in old])
        for _, part in old:
            self._others.remove(part)

    def _transcribe_clips(
        self, launch: TritonLaunch, clips: Sequence[ReloadClip]
    ) -> Chore[list[str]]:
        (texts,) = yield from self._wait(
            [self._threads.submit(hear, launch.folder, clips, self._timeout_s)]
        )
        return texts

    @staticmethod
    def _wait(futures: Sequence[Future[T]]) -> Chore[list[T]]:
        while not all(future.done() for future in futures):
            yield
        return [future.result() for future in futures]

    # ------------------------------------------------------------ steps

    @property
    def _places(self) -> list[DevicePlacement]:
        return [engine.place for engine in self.all]

    def _prepare(
        self, places: Sequence[DevicePlacement], engine: str, beside: bool
    ) -> list[TritonLaunch]:
        launches, count = [], len(places)
        folders = [triton_folder(self._folder, next(self._numbers)) for _ in places]
        try:
            for place, folder in zip(places, folders, strict=True):
                folder.mkdir(mode=0o700)
                config = dataclasses.replace(self._config, runtime=place.runtime)
                launches.append(prepare(folder, config, engine, place.environment, count, beside))
        except BaseException:
            for folder in folders:
                remove_triton(folder)
            raise
        return launches

    def _part(self, name: str, launch: TritonLaunch, log: Path) -> SupervisedProcess:
        return SupervisedProcess(
            "server",
            f"{TRITON} of {name}" if self._several else TRITON,
            lambda: launch.start(log),
            self._timeout_s,
            lambda: not any(engine.part.up for engine in self.all),
        )

    def _replace(
        self, launches: Sequence[TritonLaunch], parts: Sequence[SupervisedProcess]
    ) -> list[tuple[TritonLaunch, SupervisedProcess]]:
        """Send new requests to these Tritons; return the replaced ones."""
        old = [(engine.launch, engine.part) for engine in self.all if self._loaded]
        for engine, launch, part in zip(self.all, launches, parts, strict=True):
            if self._loaded:
                self._others.append(engine.part)
            self._others.remove(part)
            engine.former_restarts = engine.restarts
            engine.launch, engine.part = launch, part
        self._link()
        return old

    def _link(self) -> None:
        for engine in self.all:
            new = engine.link.with_name(f"{engine.link.name}.new")
            new.symlink_to(engine.launch.folder)
            new.replace(engine.link)
        touch_heartbeat(self._used)
        self._loaded = True

    def _discard(self, launches: Iterable[TritonLaunch]) -> None:
        """Remove the folders of Tritons that have ended or end now."""
        folders = {launch.folder for launch in launches}
        current = {engine.part for engine in self.all}
        for part in [part for part in self._others if part not in current]:
            part.kill()
            self._others.remove(part)
        for folder in folders:
            remove_triton(folder)


def _failure(part: SupervisedProcess) -> str | None:
    return None if part.running is None else part.running.failure()


def _answers(launch: TritonLaunch, part: SupervisedProcess) -> bool:
    """Return whether a Triton has requests and can answer them."""
    return part.running is not None and _failure(part) is None and is_held(launch.folder)


def _stop(part: SupervisedProcess) -> None:
    running = part.running
    if isinstance(running, TritonServer):
        running.stop()
    part.kill()
