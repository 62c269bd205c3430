"""Systems that make live text: a real server, or its sessions alone under a clock that jumps."""

import asyncio
import contextlib
import dataclasses
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from eval.config import Config
from eval.server import RunningServer, running
from serve.cli.live_client import Heard, converse, transcribe_live
from serve.contract.codec import to_json
from serve.contract.messages import Request, Samples, Transcript
from serve.contract.server_config import LiveConfig
from serve.gateway.live.events import Event
from serve.gateway.live.session import LiveSession
from serve.gateway.live.settings import SessionSettings
from serve.gateway.live.utterance import UpdateWindow
from serve.gateway.observe.metrics import LiveMetrics
from serve.speech.activity import Detector
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber
from serve.wire.client import Client

_CHANGED = "earshot_live_changed_words_total"
_WAIT_S = 60.0  # that a session may say nothing

T = TypeVar("T")


class System(Protocol):
    """Makes text of whole recordings and of streams."""

    def whole(self, request: Request) -> Transcript:
        """Transcribe a recording."""

    def play(
        self, blocks: Iterable[Samples], transcription: dict[str, Any]
    ) -> AsyncIterator[Heard]:
        """Stream audio as it is spoken; see `serve.cli.live_client.transcribe_live`."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in which streams are played."""

    def changed(self) -> float:
        """Count the words of hypotheses so far that did not stay."""

    def require_unbroken(self) -> None:
        """Raise an EarshotError if something has gone wrong in it."""


@contextlib.contextmanager
def open_system(config: Config, decode_s: float) -> Iterator[System]:
    """Open a system for the length of a `with` block.

    Args:
        config: the product.
        decode_s: 0 starts a real server; else sessions are simulated in this process, and every
            decoding takes so long by their clock.

    Raises:
        EarshotError: it does not start.
    """
    if decode_s:
        with open_transcriber(config) as transcriber:
            yield Simulated(transcriber, config.live, decode_s)
    else:
        with (
            running(config) as server,
            Client(server.grpc, config.transcriber.request_timeout_s) as client,
        ):
            yield _Real(server, client)


@dataclasses.dataclass(frozen=True)
class _Real:
    server: RunningServer
    client: Client

    def whole(self, request: Request) -> Transcript:
        return self.client.start(request).result()

    def play(
        self, blocks: Iterable[Samples], transcription: dict[str, Any]
    ) -> AsyncIterator[Heard]:
        return transcribe_live(f"ws://{self.server.http}", blocks, transcription, wait_s=_WAIT_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def changed(self) -> float:
        return self.server.counters(_CHANGED)[_CHANGED]

    def require_unbroken(self) -> None:
        self.server.require_unbroken()


class Simulated:
    """Sessions by a clock that stands while anything works and jumps to when there is more to do.

    So audio is heard as fast as it is decoded, and what comes of it depends on neither the machine
    nor what else it does. Streams share one decoder, which makes one text after another.

    Args:
        transcriber: decodes.
        config: how live text is made.
        decode_s: that each decoding takes.
    """

    def __init__(self, transcriber: Transcriber, config: LiveConfig, decode_s: float) -> None:
        self._transcriber = transcriber
        self._config = config
        self._decode_s = decode_s
        self._registry = CollectorRegistry()
        self._metrics = LiveMetrics(self._registry, ())
        self._decoder = asyncio.Lock()
        self._streams = 0  # that are played

    def whole(self, request: Request) -> Transcript:
        """Do as `System` says, as do the others."""
        return self._transcriber.transcribe(request)

    async def play(
        self, blocks: Iterable[Samples], transcription: dict[str, Any]
    ) -> AsyncIterator[Heard]:
        """Do as `System` says."""
        wire = _Wire(self)
        work = asyncio.create_task(wire.work())
        self._streams += 1
        try:
            async for news in converse(wire, blocks, transcription, pace=1.0, wait_s=_WAIT_S):
                yield news
        finally:
            self._streams -= 1
            work.cancel()
            await asyncio.wait((work,))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do as `System` says."""
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            return runner.run(work)

    def changed(self) -> float:
        """Do as `System` says."""
        return self._registry.get_sample_value(_CHANGED) or 0.0

    def require_unbroken(self) -> None:
        """Do as `System` says."""

    def session(self, send: "asyncio.Queue[Event | Exception]") -> LiveSession:
        """Make a session whose events go into a queue."""

        async def transcribe(_model: str | None, window: UpdateWindow) -> Transcript:
            async with self._decoder:
                request = window.request(self._config, np.concatenate(window.audio))
                transcript = self.whole(request)
                await asyncio.sleep(self._decode_s)
            return transcript

        return LiveSession(
            self._config,
            str,
            transcribe,
            send.put,
            lambda _: None,
            Detector(),
            InlineExecutor(),
            self._metrics,
            lambda: self._streams,
            SessionSettings(),
        )


class _Wire:
    """Stands for the connection to a session in this process."""

    def __init__(self, system: Simulated) -> None:
        self._events = asyncio.Queue[Event | Exception]()
        self._session = system.session(self._events)

    async def work(self) -> None:
        try:
            await self._session.start()
            await self._session.work()
        except Exception as error:  # noqa: BLE001 - raised where somebody waits for events
            await self._events.put(error)

    async def send(self, message: str) -> None:
        await self._session.handle(message)

    async def recv(self) -> str:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return to_json(event)


class InlineExecutor(Executor):
    """Runs work at once, in the thread that submits it: a clock that jumps waits for no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Return the result as a future that is done."""
        future = Future[T]()
        future.set_result(fn(*args, **kwargs))
        return future


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop by whose clock nothing but waiting takes time, and that waits for nothing."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Return the seconds."""
        return self._jumps.waited_s


class _Jumps(selectors.SelectSelector):
    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waited_s += max(0.0, timeout or 0.0)
        return super().select(None if timeout is None else 0.0)
